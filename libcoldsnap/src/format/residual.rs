//! `weights.blob`: the bytes of allocations that no model extent owns, in one of two layouts.

use serde::{Deserialize, Serialize};

use super::pack;
use crate::extent::LayoutError;

/// How pieces lie in a residual blob (`residual_layout` in a manifest).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ResidualLayout {
    /// Field absent: one after the other from offset 0 to the end of the file.
    #[default]
    Contiguous,
    /// `"shared-padded-v1"`: at multiples of 4096, each zero padded to 4096. Several manifests share the file and
    /// each lists only its own pieces, so gaps between listed pieces are legal.
    SharedPadded,
}

/// The name of [`ResidualLayout::SharedPadded`].
pub const SHARED_PADDED: &str = "shared-padded-v1";

impl ResidualLayout {
    /// Its name for people; in a manifest the contiguous layout is the absence of the field.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Contiguous => "contiguous",
            Self::SharedPadded => SHARED_PADDED,
        }
    }

    pub(crate) const fn is_contiguous(&self) -> bool {
        matches!(self, Self::Contiguous)
    }

    /// Offsets of pieces of these sizes, and the size of the file that holds just them.
    ///
    /// # Errors
    /// `Malformed` when a size is 0 or the sum overflows.
    pub fn plan(self, sizes: &[u64]) -> Result<(Vec<u64>, u64), LayoutError> {
        let mut offsets = Vec::with_capacity(sizes.len());
        let mut end = 0;
        for (n, &size) in sizes.iter().enumerate() {
            if size == 0 {
                return Err(LayoutError::malformed(format!("residual piece {n}"), "its size is 0"));
            }
            offsets.push(end);
            end = self
                .end_of(end, size)
                .ok_or_else(|| LayoutError::malformed("residual blob", "the size overflows 64 bits"))?;
        }
        Ok((offsets, end))
    }

    /// Checks the pieces of one manifest, `(offset, size)` in any order, against a file of `blob_bytes`.
    ///
    /// # Errors
    /// `Malformed` naming the first piece that breaks the layout, `SizeChanged` when the pieces do not end where
    /// the file ends (contiguous) or end beyond it.
    pub fn check(self, pieces: &[(u64, u64)], blob_bytes: u64) -> Result<(), LayoutError> {
        let name = |n: usize| format!("residual_extents[{n}]");
        let mut order: Vec<usize> = (0..pieces.len()).collect();
        order.sort_by_key(|&n| pieces[n]);
        let mut end = 0;
        for n in order {
            let (offset, size) = pieces[n];
            if size == 0 {
                return Err(LayoutError::malformed(name(n), "its size is 0"));
            }
            let problem = match self {
                _ if offset < end => Some("overlaps the piece before it, which ends at"),
                Self::Contiguous if offset > end => Some("leaves a gap in a contiguous blob after"),
                Self::SharedPadded if offset % pack::ALIGNMENT != 0 => {
                    Some("is not at a multiple of 4096; the piece before it ends at")
                }
                _ => None,
            };
            if let Some(problem) = problem {
                let problem = format!("the piece at offset {offset} of {size} bytes {problem} {end}");
                return Err(LayoutError::malformed(name(n) + ".offset", problem));
            }
            end = self
                .end_of(offset, size)
                .ok_or_else(|| LayoutError::malformed(name(n), "its end overflows 64 bits"))?;
        }
        match self {
            Self::Contiguous => LayoutError::same_size("residual_blob_bytes", end, blob_bytes),
            Self::SharedPadded if end > blob_bytes => LayoutError::same_size(
                "residual_blob_bytes (at least the end of the last piece)",
                end,
                blob_bytes,
            ),
            Self::SharedPadded => Ok(()),
        }
    }

    fn end_of(self, offset: u64, size: u64) -> Option<u64> {
        let end = offset.checked_add(size)?;
        match self {
            Self::Contiguous => Some(end),
            Self::SharedPadded => end.checked_next_multiple_of(pack::ALIGNMENT),
        }
    }
}

impl Serialize for ResidualLayout {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Contiguous => serializer.serialize_none(),
            Self::SharedPadded => serializer.serialize_str(SHARED_PADDED),
        }
    }
}

impl<'de> Deserialize<'de> for ResidualLayout {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        if text == SHARED_PADDED {
            return Ok(Self::SharedPadded);
        }
        Err(serde::de::Error::custom(format!(
            "unknown residual layout {text:?}: expected {SHARED_PADDED:?} or no field"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_pass_their_own_check() {
        for layout in [ResidualLayout::Contiguous, ResidualLayout::SharedPadded] {
            let sizes = [4095, 1, 4096, 8064];
            let (offsets, bytes) = layout.plan(&sizes).unwrap();
            let mut pieces: Vec<_> = offsets.into_iter().zip(sizes).collect();
            pieces.reverse();
            layout.check(&pieces, bytes).unwrap();
            assert_eq!(layout.check(&pieces, bytes - 1).unwrap_err().kind(), "SizeChanged");
        }
        assert_eq!(ResidualLayout::SharedPadded.plan(&[4095, 1]).unwrap(), (vec![0, 4096], 8192));
        assert_eq!(ResidualLayout::Contiguous.plan(&[4095, 1]).unwrap(), (vec![0, 4095], 4096));
    }

    #[test]
    fn contiguous_allows_no_gap_and_no_tail() {
        let layout = ResidualLayout::Contiguous;
        assert_eq!(layout.check(&[(0, 10), (11, 5)], 16).unwrap_err().kind(), "Malformed");
        assert_eq!(layout.check(&[(1, 10)], 11).unwrap_err().kind(), "Malformed");
        assert_eq!(layout.check(&[(0, 10), (9, 5)], 14).unwrap_err().kind(), "Malformed");
        assert_eq!(layout.check(&[(0, 10)], 11).unwrap_err().kind(), "SizeChanged");
        layout.check(&[], 0).unwrap();
    }

    #[test]
    fn shared_allows_gaps_but_no_overlap_of_padded_pieces() {
        let layout = ResidualLayout::SharedPadded;
        layout.check(&[(8192, 10), (0, 4097)], 1 << 20).unwrap();
        layout.check(&[], 4096).unwrap();
        assert_eq!(layout.check(&[(0, 4097), (4096, 1)], 8192).unwrap_err().kind(), "Malformed");
        assert_eq!(layout.check(&[(100, 4)], 8192).unwrap_err().kind(), "Malformed");
        assert_eq!(layout.check(&[(u64::MAX - 4095, 4095)], 8192).unwrap_err().kind(), "Malformed");
    }
}
