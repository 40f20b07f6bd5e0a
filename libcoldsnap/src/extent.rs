//! Interval arithmetic over addresses, and the proof that a set of extents covers every allocation.
//!
//! No I/O and no file formats here: the same rules serve the manifests, the capture and the restore.

mod coverage;

pub use coverage::{CoveredLayout, LayoutError, Owner, Piece};

use std::fmt;

/// A half-open range of bytes `[ptr, ptr + size)` in a process; `ptr > 0`, `size > 0`, and the end does
/// not overflow 64 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    ptr: u64,
    size: u64,
}

/// Why an address and a size are not an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ExtentError {
    /// Address zero is no address.
    #[error("an extent of {size} bytes has address 0")]
    NullPointer {
        /// The size that came with it.
        size: u64,
    },
    /// An extent owns at least one byte.
    #[error("the extent at {ptr:#x} has size 0")]
    Empty {
        /// The address that came with it.
        ptr: u64,
    },
    /// The end is beyond the 64 bit address space.
    #[error("the extent at {ptr:#x} of {size} bytes ends beyond the address space")]
    Overflow {
        /// First address.
        ptr: u64,
        /// Size in bytes.
        size: u64,
    },
}

impl Extent {
    /// The extent of `size` bytes at `ptr`.
    ///
    /// # Errors
    /// When `ptr` or `size` is zero or the end overflows.
    pub const fn new(ptr: u64, size: u64) -> Result<Self, ExtentError> {
        if ptr == 0 {
            return Err(ExtentError::NullPointer { size });
        }
        if size == 0 {
            return Err(ExtentError::Empty { ptr });
        }
        if ptr.checked_add(size).is_none() {
            return Err(ExtentError::Overflow { ptr, size });
        }
        Ok(Self { ptr, size })
    }

    /// The extent `[ptr, end)`.
    ///
    /// # Errors
    /// When it is empty (also when `end < ptr`) or starts at 0.
    pub const fn from_bounds(ptr: u64, end: u64) -> Result<Self, ExtentError> {
        Self::new(ptr, end.saturating_sub(ptr))
    }

    /// First address.
    pub const fn ptr(self) -> u64 {
        self.ptr
    }

    /// Size in bytes, never zero.
    pub const fn size(self) -> u64 {
        self.size
    }

    /// First address after the extent.
    pub const fn end(self) -> u64 {
        self.ptr + self.size
    }

    /// Whether every byte of `other` is in this extent.
    pub const fn contains(self, other: Self) -> bool {
        self.ptr <= other.ptr && other.end() <= self.end()
    }

    /// The bytes that are in both, if any.
    pub fn intersection(self, other: Self) -> Option<Self> {
        Self::from_bounds(self.ptr.max(other.ptr), self.end().min(other.end())).ok()
    }

    /// Whether the two share at least one byte.
    pub fn overlaps(self, other: Self) -> bool {
        self.intersection(other).is_some()
    }

    /// The largest extent inside this one whose ends are multiples of `page_size` (a power of two).
    pub fn page_interior(self, page_size: u64) -> Option<Self> {
        let start = self.ptr.checked_next_multiple_of(page_size)?;
        Self::from_bounds(start, self.end() - self.end() % page_size).ok()
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{:#x}, {:#x}) ({} bytes)", self.ptr, self.end(), self.size)
    }
}

impl fmt::Debug for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Finds the first (lowest) overlap among extents in any order: the two extents' positions in the input
/// and the bytes that both claim.
pub fn first_overlap(extents: &[Extent]) -> Option<(usize, usize, Extent)> {
    let mut order: Vec<usize> = (0..extents.len()).collect();
    order.sort_by_key(|&i| (extents[i], i));
    // In start order the first overlap, if any, is between neighbours.
    order.windows(2).find_map(|pair| {
        let (first, second) = (pair[0], pair[1]);
        extents[first].intersection(extents[second]).map(|common| (first, second, common))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(ptr: u64, size: u64) -> Extent {
        Extent::new(ptr, size).unwrap()
    }

    #[test]
    fn refuses_what_is_no_extent() {
        assert_eq!(Extent::new(0, 8), Err(ExtentError::NullPointer { size: 8 }));
        assert_eq!(Extent::new(8, 0), Err(ExtentError::Empty { ptr: 8 }));
        assert_eq!(Extent::new(8, u64::MAX), Err(ExtentError::Overflow { ptr: 8, size: u64::MAX }));
        assert!(Extent::new(8, u64::MAX - 8).is_ok());
        assert!(Extent::from_bounds(8, 8).is_err());
        assert!(Extent::from_bounds(8, 7).is_err());
    }

    #[test]
    fn relations() {
        let a = extent(100, 50);
        assert!(a.contains(extent(100, 50)) && a.contains(extent(149, 1)) && !a.contains(extent(149, 2)));
        assert_eq!(a.intersection(extent(140, 100)), Some(extent(140, 10)));
        assert!(!a.overlaps(extent(150, 1)) && !a.overlaps(extent(99, 1)));
    }

    #[test]
    fn page_interior_drops_ragged_ends() {
        assert_eq!(extent(4097, 3 * 4096).page_interior(4096), Some(extent(8192, 2 * 4096)));
        assert_eq!(extent(4096, 4096).page_interior(4096), Some(extent(4096, 4096)));
        assert_eq!(extent(4097, 4096).page_interior(4096), None);
        assert_eq!(extent(u64::MAX - 5, 3).page_interior(4096), None);
    }

    #[test]
    fn first_overlap_is_the_lowest() {
        let all = [extent(1000, 10), extent(10, 10), extent(15, 1), extent(1005, 100)];
        assert_eq!(first_overlap(&all), Some((1, 2, extent(15, 1))));
        assert_eq!(first_overlap(&all[..2]), None);
    }
}
