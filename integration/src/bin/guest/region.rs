//! Mappings of known content.

use std::ptr::NonNull;

use anyhow::{Context, Result};
use coldsnap_integration::pattern::{PAGE, WORDS, check, fill};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};

/// A private anonymous mapping that lives as long as the process.
#[derive(Debug)]
pub struct Region {
    start: NonNull<u64>,
    pages: usize,
}

// SAFETY: the region owns its mapping, which no other value refers to.
unsafe impl Send for Region {}

impl Region {
    /// Maps `bytes` of memory, readable and writable.
    pub fn map(bytes: usize) -> Result<Self> {
        let pages = bytes.div_ceil(PAGE);
        // SAFETY: a new anonymous mapping at an address that the kernel chooses; it is never unmapped.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                pages * PAGE,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        let start = start.with_context(|| format!("cannot map {bytes} bytes"))?;
        Ok(Self { start: NonNull::new(start.cast()).context("mapped at address 0")?, pages })
    }

    /// Number of pages.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// The words of one page. The caller may read them; writing needs that the page was not protected.
    pub fn page(&mut self, page: usize) -> &mut [u64] {
        assert!(page < self.pages, "page {page} of {}", self.pages);
        // SAFETY: inside the mapping, which lives as long as the process; `&mut self` keeps other references away.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(page * WORDS), WORDS) }
    }

    /// Takes the right to write from `count` pages, which gives them a VMA of their own.
    pub fn protect(&mut self, first: usize, count: usize) -> Result<()> {
        assert!(first + count <= self.pages, "pages {first}+{count} of {}", self.pages);
        // SAFETY: inside the mapping; from here on the caller only reads these pages.
        let done = unsafe {
            mprotect(self.start.as_ptr().add(first * WORDS).cast(), count * PAGE, MprotectFlags::READ)
        };
        done.context("cannot protect pages")
    }

    /// Fills every page from the seed that `seed_of` names for it.
    pub fn fill(&mut self, seed_of: impl Fn(usize) -> u64) {
        for page in 0..self.pages {
            fill(self.page(page), seed_of(page), page);
        }
    }

    /// Checks every page against the seed that `seed_of` names for it; returns the bytes checked.
    pub fn check(&mut self, seed_of: impl Fn(usize) -> u64) -> Result<u64> {
        for page in 0..self.pages {
            check(self.page(page), seed_of(page), page)?;
        }
        Ok((self.pages * PAGE) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_wrong_word_is_found_and_named() {
        let mut region = Region::map(4 * PAGE).unwrap();
        region.fill(|page| page as u64 % 2);
        assert_eq!(region.check(|page| page as u64 % 2).unwrap(), 4 * PAGE as u64);
        region.page(3)[17] ^= 1 << 40;
        let address = format!("{:p}", &raw const region.page(3)[17]);
        let error = region.check(|page| page as u64 % 2).unwrap_err().to_string();
        assert!(error.starts_with(&address) && error.contains("page 3 of its region, word 17"), "{error}");
    }

    #[test]
    fn pages_of_different_places_and_seeds_differ() {
        let mut region = Region::map(2 * PAGE).unwrap();
        region.fill(|_| 7);
        assert!(region.check(|_| 8).is_err());
        let first = region.page(0).to_vec();
        assert_ne!(first, region.page(1));
    }
}
