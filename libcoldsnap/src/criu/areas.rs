//! What must hold of a process's memory areas before anything computes with their addresses.

use super::image::ImageError;
use super::proto::{MmEntry, VmaEntry};
use super::runs::PAGE_SIZE;
use super::vma_status;

/// Checks the areas of an `mm` image: page aligned, not empty, in address order, without overlap, and none runs over in
/// its file. (Guard ranges are listed as areas but lie inside one.)
///
/// # Errors
/// [`ImageError::Malformed`] naming the first area that breaks a rule.
pub fn check(name: &str, mm: &MmEntry) -> Result<(), ImageError> {
    let malformed = |vma: &VmaEntry, problem: &str| {
        let (start, end, offset) = (vma.start(), vma.end(), vma.pgoff());
        let reason = format!("the area {start:#x}-{end:#x}, offset {offset:#x}, {problem}");
        Err(ImageError::Malformed { name: name.to_owned(), reason })
    };
    let mut previous_end = 0;
    for vma in &mm.vmas {
        let Some(size) = vma.end().checked_sub(vma.start()).filter(|size| *size > 0) else {
            return malformed(vma, "has no size");
        };
        if vma.start() % PAGE_SIZE != 0 || vma.end() % PAGE_SIZE != 0 {
            return malformed(vma, "is not page aligned");
        }
        if vma.pgoff().checked_add(size).is_none() {
            return malformed(vma, "runs over in its file");
        }
        if vma.status() & vma_status::AREA_GUARD == 0 {
            if vma.start() < previous_end {
                return malformed(vma, "overlaps the one before, or is out of order");
            }
            previous_end = vma.end();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mm(areas: &[(u64, u64, u64, u32)]) -> MmEntry {
        let mut mm = MmEntry::new();
        mm.vmas = areas
            .iter()
            .map(|&(start, end, offset, status)| {
                let mut vma = VmaEntry::new();
                vma.set_start(start);
                vma.set_end(end);
                vma.set_pgoff(offset);
                vma.set_status(status);
                vma
            })
            .collect();
        mm
    }

    #[test]
    fn impossible_areas_are_named() {
        check("x", &mm(&[(4096, 8192, 0, 1), (8192, 12288, u64::MAX - 4096, 1)])).unwrap();
        check("x", &mm(&[(4096, 8192, 0, 1), (4096, 8192, 0, vma_status::AREA_GUARD)])).unwrap();
        for (areas, word) in [
            (vec![(8192, 4096, 0, 1)], "no size"),
            (vec![(4096, 4096, 0, 1)], "no size"),
            (vec![(4096, 8192, u64::MAX - 4095, 1)], "runs over"),
            (vec![(4096, 8193, 0, 1)], "aligned"),
            (vec![(4096, 12288, 0, 1), (8192, 16384, 0, 1)], "overlaps"),
            (vec![(8192, 12288, 0, 1), (4096, 8192, 0, 1)], "out of order"),
        ] {
            let text = check("mm-1.img", &mm(&areas)).unwrap_err().to_string();
            assert!(text.contains("mm-1.img") && text.contains(word), "{text}");
        }
    }
}
