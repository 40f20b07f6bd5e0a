//! Semantic ids: what a model extent is, independent of where it lies.
//!
//! An extent that holds named tensors has the SHA-256 of the compact ASCII JSON of its sorted
//! `[name, offset in the extent, length]` members. An extent without names has the SHA-256 of
//! `ordinal:<index>:size:<size>`. Tensors of one allocation that touch or overlap are one extent.

use serde_json::Value;

use super::canonical_json;
use crate::digest::Digest;
use crate::extent::{Extent, ExtentError};

/// A named tensor in a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedRange {
    /// The tensor's name in the checkpoint.
    pub name: String,
    /// Its bytes.
    pub extent: Extent,
    /// First address of the allocation that holds it.
    pub allocation_ptr: u64,
}

/// Touching or overlapping tensors of one allocation, as one extent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MergedRange {
    /// All bytes.
    pub extent: Extent,
    /// First address of the allocation.
    pub allocation_ptr: u64,
    /// Sorted `(name, offset in the extent, length)`.
    pub members: Vec<(String, u64, u64)>,
}

impl MergedRange {
    /// The extent's semantic id.
    pub fn semantic_id(&self) -> Digest {
        named(&self.members)
    }
}

/// The id of an extent that holds these `(name, offset in the extent, length)` members, in any order.
pub fn named(members: &[(String, u64, u64)]) -> Digest {
    let mut sorted: Vec<_> = members.iter().collect();
    sorted.sort();
    let list = sorted
        .into_iter()
        .map(|(name, offset, length)| {
            Value::from(vec![name.as_str().into(), (*offset).into(), Value::from(*length)])
        })
        .collect();
    canonical_json::digest(&Value::Array(list))
}

/// The id of the `index`-th extent (in allocation and address order) of `size` bytes, which has no names.
pub fn ordinal(index: usize, size: u64) -> Digest {
    Digest::of(format!("ordinal:{index}:size:{size}").as_bytes())
}

/// Merges tensors of the same allocation that touch or overlap; the result is in
/// (allocation, address) order, which is the source order of a pack.
///
/// # Errors
/// Cannot fail for ranges that fit into one address space.
pub fn merge(ranges: &[NamedRange]) -> Result<Vec<MergedRange>, ExtentError> {
    let mut order: Vec<&NamedRange> = ranges.iter().collect();
    order.sort_by_key(|range| (range.allocation_ptr, range.extent));
    let mut merged: Vec<(Extent, u64, Vec<&NamedRange>)> = Vec::new();
    for range in order {
        match merged.last_mut() {
            Some((extent, allocation, members))
                if *allocation == range.allocation_ptr && range.extent.ptr() <= extent.end() =>
            {
                *extent = Extent::from_bounds(extent.ptr(), extent.end().max(range.extent.end()))?;
                members.push(range);
            }
            _ => merged.push((range.extent, range.allocation_ptr, vec![range])),
        }
    }
    Ok(merged
        .into_iter()
        .map(|(extent, allocation_ptr, ranges)| {
            let mut members: Vec<_> = ranges
                .into_iter()
                .map(|r| (r.name.clone(), r.extent.ptr() - extent.ptr(), r.extent.size()))
                .collect();
            members.sort();
            MergedRange { extent, allocation_ptr, members }
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors() {
        let file: Value =
            serde_json::from_str(include_str!("../../tests/vectors/semantic-ids.json")).unwrap();
        let cases = file["semantic_ids"].as_array().unwrap();
        assert_eq!(cases.len(), 3);
        for case in cases {
            let mut members: Vec<(String, u64, u64)> =
                serde_json::from_value(case["members"].clone()).unwrap();
            members.reverse();
            assert_eq!(named(&members).hex(), case["semantic_id"].as_str().unwrap());
        }
    }

    #[test]
    fn merges_touching_and_overlapping_but_not_across_allocations() {
        let range = |name: &str, ptr, size, allocation_ptr| NamedRange {
            name: name.to_owned(),
            extent: Extent::new(ptr, size).unwrap(),
            allocation_ptr,
        };
        let merged = merge(&[
            range("c", 4200, 96, 4096),
            range("a", 4096, 100, 4096),
            range("b", 4196, 10, 4096),
            range("next", 8192, 8, 8192),
            range("inner", 4100, 4, 4096),
            range("tail", 4300, 3892, 4096),
        ])
        .unwrap();
        assert_eq!(merged.len(), 3);
        assert_eq!(merged[0].extent, Extent::new(4096, 200).unwrap());
        assert_eq!(
            merged[0].members,
            [("a".into(), 0, 100), ("b".into(), 100, 10), ("c".into(), 104, 96), ("inner".into(), 4, 4)]
        );
        assert_eq!(merged[1].extent.end(), merged[2].extent.ptr());
        assert_ne!(merged[1].semantic_id(), merged[2].semantic_id());
    }
}
