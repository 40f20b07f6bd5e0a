//! `model-weights.pack`: the order and the offsets of extents in a model payload.
//!
//! The file has no header, index or trailer. Extents follow in ascending (SHA-256 of the logical bytes,
//! size), ties in source order, from offset 0; each, the last one too, is followed by zeros up to a multiple
//! of [`ALIGNMENT`]. Identical extents are written again. So addresses, allocation order, worker and capture
//! never influence the bytes, and captures of one model share one payload.

use crate::digest::lanes::TwoWay;
use crate::digest::{Digest, Sha256};
use crate::extent::LayoutError;

/// Every extent starts at a multiple of this, and the file's size is one.
pub const ALIGNMENT: u64 = 4096;

/// What the order depends on: one extent's content, without its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExtentSum {
    /// Size in bytes, not zero.
    pub size: u64,
    /// SHA-256 of the bytes, without padding.
    pub sha256: Digest,
    /// CRC-32 (IEEE) of the bytes, without padding.
    pub crc32: u32,
}

impl ExtentSum {
    /// Sums an extent that is given as chunks.
    pub fn of<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut sum = ExtentSummer::default();
        chunks.into_iter().for_each(|chunk| sum.update(chunk));
        sum.finish()
    }
}

/// Sums the bytes of one extent as they come.
#[derive(Debug, Default)]
pub struct ExtentSummer {
    size: u64,
    sha256: Sha256,
    crc32: crc32fast::Hasher,
}

impl ExtentSummer {
    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.sha256.update(bytes);
        self.count(bytes);
    }

    /// Adds bytes to each of two extents, faster than one after the other.
    pub fn update_two(a: (&mut Self, &[u8]), b: (&mut Self, &[u8])) {
        Sha256::update_two((&mut a.0.sha256, a.1), (&mut b.0.sha256, b.1));
        a.0.count(a.1);
        b.0.count(b.1);
    }

    /// The sums of everything added.
    pub fn finish(self) -> ExtentSum {
        ExtentSum { size: self.size, sha256: self.sha256.finish(), crc32: self.crc32.finalize() }
    }

    fn count(&mut self, bytes: &[u8]) {
        self.size += bytes.len() as u64;
        self.crc32.update(bytes);
    }
}

impl TwoWay for ExtentSummer {
    type Sum = ExtentSum;

    fn update(&mut self, bytes: &[u8]) {
        Self::update(self, bytes);
    }

    fn update_two(a: (&mut Self, &[u8]), b: (&mut Self, &[u8])) {
        Self::update_two(a, b);
    }

    fn finish(self) -> ExtentSum {
        Self::finish(self)
    }
}

/// Where one extent is in a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackExtent {
    /// Position of the extent in the list that the pack was planned from.
    pub source_index: usize,
    /// Offset in the file, a multiple of [`ALIGNMENT`].
    pub offset: u64,
    /// Size and checksums of the logical bytes.
    pub sum: ExtentSum,
}

/// The layout of a pack: extents in file order at cumulative aligned offsets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackLayout {
    extents: Vec<PackExtent>,
    bytes: u64,
    model_weight_bytes: u64,
}

impl PackLayout {
    /// Plans a pack of these extents, given in source order (allocation pointer, pointer).
    ///
    /// # Errors
    /// `Malformed` when there are none, one has size 0, or the sum overflows.
    pub fn plan(sums: &[ExtentSum]) -> Result<Self, LayoutError> {
        if sums.is_empty() {
            return Err(LayoutError::malformed("pack", "a pack has at least one extent"));
        }
        let mut order: Vec<usize> = (0..sums.len()).collect();
        // Stable, so that ties keep source order.
        order.sort_by_key(|&n| (sums[n].sha256, sums[n].size));
        let mut extents = Vec::with_capacity(sums.len());
        let (mut bytes, mut model_weight_bytes) = (0, 0);
        for source_index in order {
            let sum = sums[source_index];
            if sum.size == 0 {
                return Err(LayoutError::malformed(format!("extent {source_index}"), "its size is 0"));
            }
            extents.push(PackExtent { source_index, offset: bytes, sum });
            bytes = next_offset(bytes, sum.size)
                .ok_or_else(|| LayoutError::malformed("pack", "the size overflows 64 bits"))?;
            model_weight_bytes += sum.size;
        }
        Ok(Self { extents, bytes, model_weight_bytes })
    }

    /// Checks extents listed with their offsets, as a manifest lists them: sorted order, offsets that are the
    /// cumulative aligned offsets. `source_index` of the result is the position in the list.
    ///
    /// # Errors
    /// `Malformed` naming the first extent that is out of order or at another offset, or has size 0.
    pub fn from_listed(listed: &[(u64, ExtentSum)]) -> Result<Self, LayoutError> {
        let name = |n: usize| format!("model_weight_extents[{n}]");
        let mut extents: Vec<PackExtent> = Vec::with_capacity(listed.len());
        let (mut bytes, mut model_weight_bytes) = (0, 0);
        for (source_index, &(offset, sum)) in listed.iter().enumerate() {
            if sum.size == 0 {
                return Err(LayoutError::malformed(name(source_index), "its size is 0"));
            }
            if let Some(before) = extents.last()
                && (before.sum.sha256, before.sum.size) > (sum.sha256, sum.size)
            {
                let problem =
                    "out of pack order: its (sha256, size) is smaller than that of the extent before";
                return Err(LayoutError::malformed(name(source_index), problem));
            }
            if offset != bytes {
                let problem = format!("it is at offset {offset}, pack order puts it at {bytes}");
                return Err(LayoutError::malformed(name(source_index) + ".offset", problem));
            }
            extents.push(PackExtent { source_index, offset, sum });
            bytes = next_offset(bytes, sum.size)
                .ok_or_else(|| LayoutError::malformed(name(source_index), "its end overflows 64 bits"))?;
            model_weight_bytes += sum.size;
        }
        Ok(Self { extents, bytes, model_weight_bytes })
    }

    /// The extents in file order.
    pub fn extents(&self) -> &[PackExtent] {
        &self.extents
    }

    /// Size of the file, with padding.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Sum of the extents' sizes, without padding.
    pub const fn model_weight_bytes(&self) -> u64 {
        self.model_weight_bytes
    }

    /// The extents in the order they were planned from: `result[n].source_index == n`.
    pub fn in_source_order(&self) -> Vec<PackExtent> {
        let mut extents = self.extents.clone();
        extents.sort_by_key(|extent| extent.source_index);
        extents
    }
}

/// Number of zero bytes after an extent of this size.
pub const fn padding(size: u64) -> u64 {
    size.wrapping_neg() % ALIGNMENT
}

fn next_offset(offset: u64, size: u64) -> Option<u64> {
    offset.checked_add(size)?.checked_next_multiple_of(ALIGNMENT)
}

/// The bytes of a pack whose extents are in memory, in file order: each item is at most one chunk of the source
/// or a run of zeros. `extents[n]` are the chunks of the extent with `source_index` n.
pub fn canonical_stream<'a>(
    layout: &'a PackLayout,
    extents: &'a [Vec<&'a [u8]>],
) -> impl Iterator<Item = &'a [u8]> + 'a {
    // The remainder of a division by 4096 fits everywhere.
    #[expect(clippy::cast_possible_truncation, reason = "padding is below 4096")]
    layout.extents.iter().flat_map(move |extent| {
        let chunks = extents.get(extent.source_index).map_or(&[][..], Vec::as_slice);
        chunks.iter().copied().chain(std::iter::once(&ZEROS[..padding(extent.sum.size) as usize]))
    })
}

static ZEROS: [u8; 4096] = [0; 4096];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    pub(crate) fn pattern(name: &str, size: usize) -> Vec<u8> {
        match name {
            "mod251" => (0..size).map(|i| u8::try_from(i % 251).unwrap()).collect(),
            "sevens" => vec![7; size],
            "zeros" => vec![0; size],
            "xorshift64" => {
                let mut x: u64 = 88_172_645_463_325_252;
                let mut bytes = Vec::with_capacity(size + 8);
                while bytes.len() < size {
                    x ^= x << 13;
                    x ^= x >> 7;
                    x ^= x << 17;
                    bytes.extend_from_slice(&x.to_le_bytes());
                }
                bytes.truncate(size);
                bytes
            }
            other => panic!("unknown pattern {other}"),
        }
    }

    fn build(extents: &[Vec<u8>]) -> (PackLayout, Vec<u8>) {
        let chunks: Vec<Vec<&[u8]>> = extents.iter().map(|e| vec![e.as_slice()]).collect();
        let sums: Vec<_> = chunks.iter().map(|c| ExtentSum::of(c.iter().copied())).collect();
        let layout = PackLayout::plan(&sums).unwrap();
        let bytes = canonical_stream(&layout, &chunks).collect::<Vec<_>>().concat();
        assert_eq!(bytes.len() as u64, layout.bytes());
        (layout, bytes)
    }

    #[test]
    fn vectors() {
        let file: Value = serde_json::from_str(include_str!("../../tests/vectors/packs.json")).unwrap();
        assert_eq!(file["alignment"].as_u64().unwrap(), ALIGNMENT);
        let cases = file["packs"].as_array().unwrap();
        assert_eq!(cases.len(), 5);
        for case in cases {
            let name = case["name"].as_str().unwrap();
            let extents: Vec<_> = case["extents_in"]
                .as_array()
                .unwrap()
                .iter()
                .map(|e| {
                    let size = usize::try_from(e["size"].as_u64().unwrap()).unwrap();
                    pattern(e["pattern"].as_str().unwrap(), size)
                })
                .collect();
            let (layout, bytes) = build(&extents);
            let digest = Digest::of(&bytes);
            assert_eq!(digest.to_string(), case["pack_sha256"].as_str().unwrap(), "{name}");
            assert_eq!(digest.payload_path().to_str().unwrap(), case["object_path"].as_str().unwrap());
            assert_eq!(layout.bytes(), case["pack_bytes"].as_u64().unwrap(), "{name}");
            assert_eq!(layout.model_weight_bytes(), case["model_weight_bytes"].as_u64().unwrap(), "{name}");
            let out = case["extents_out"].as_array().unwrap();
            assert_eq!(out.len(), layout.extents().len());
            for (expected, extent) in out.iter().zip(layout.extents()) {
                assert_eq!(expected["source_index"].as_u64().unwrap(), extent.source_index as u64, "{name}");
                assert_eq!(expected["offset"].as_u64().unwrap(), extent.offset, "{name}");
                assert_eq!(expected["size"].as_u64().unwrap(), extent.sum.size, "{name}");
                assert_eq!(expected["sha256"].as_str().unwrap(), extent.sum.sha256.hex(), "{name}");
                assert_eq!(
                    expected["crc32"].as_str().unwrap(),
                    format!("{:08x}", extent.sum.crc32),
                    "{name}"
                );
            }
        }
    }

    #[test]
    fn refuses_empty() {
        assert!(PackLayout::plan(&[]).is_err());
        assert!(PackLayout::plan(&[ExtentSum::of([&b""[..]])]).is_err());
    }

    #[test]
    fn reader_finds_wrong_order_and_offset() {
        let (layout, _) = build(&[vec![1; 10], vec![2; 5000], vec![3; 4096]]);
        let listed: Vec<_> = layout.extents().iter().map(|e| (e.offset, e.sum)).collect();
        let read = PackLayout::from_listed(&listed).unwrap();
        assert_eq!((read.bytes(), read.model_weight_bytes()), (layout.bytes(), layout.model_weight_bytes()));

        let mut swapped = listed.clone();
        swapped.swap(0, 1);
        assert!(PackLayout::from_listed(&swapped).unwrap_err().to_string().contains("model_weight_extents"));
        let mut moved = listed.clone();
        moved[2].0 += ALIGNMENT;
        assert!(
            PackLayout::from_listed(&moved)
                .unwrap_err()
                .to_string()
                .contains("model_weight_extents[2].offset")
        );
        let mut huge = listed;
        huge[2].1.size = u64::MAX - 1;
        assert!(PackLayout::from_listed(&huge).is_err());
    }

    proptest! {
        #[test]
        fn permuting_sources_never_changes_the_bytes(
            extents in proptest::collection::vec((0u8..4, 1usize..9000), 1..12),
            seed in any::<u64>(),
        ) {
            let extents: Vec<Vec<u8>> = extents.into_iter().map(|(byte, size)| vec![byte; size]).collect();
            let mut shuffled = extents.clone();
            let mut state = seed | 1;
            for n in (1..shuffled.len()).rev() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                shuffled.swap(n, usize::try_from(state >> 33).unwrap() % (n + 1));
            }
            let (layout, bytes) = build(&extents);
            prop_assert_eq!(&bytes, &build(&shuffled).1);
            prop_assert_eq!(bytes.len() as u64 % ALIGNMENT, 0);
            for (n, extent) in layout.in_source_order().into_iter().enumerate() {
                let start = usize::try_from(extent.offset).unwrap();
                prop_assert_eq!(&bytes[start..start + extents[n].len()], extents[n].as_slice());
            }
        }

        #[test]
        fn chunking_never_changes_the_sums(data in proptest::collection::vec(any::<u8>(), 1..5000), cut in any::<proptest::sample::Index>()) {
            let (a, b) = data.split_at(cut.index(data.len()));
            prop_assert_eq!(ExtentSum::of([data.as_slice()]), ExtentSum::of([a, b]));
        }
    }
}
