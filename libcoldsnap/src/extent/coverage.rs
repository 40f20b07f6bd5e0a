//! The coverage rule, fail closed: model and residual extents are pairwise disjoint, each inside its
//! allocation, and together they own every byte of every allocation.
//!
//! [`CoveredLayout`] is the proof: only [`CoveredLayout::prove`] makes one.

use std::path::PathBuf;

use super::{Extent, ExtentError};
use crate::digest::Digest;

/// Why a manifest, or a file it describes, is refused. Each names the first offending range or value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Bytes of an allocation that nobody owns would be garbage after a restore.
    #[error("gap: {missing} of the allocation {allocation} belongs to no model or residual extent")]
    Gap {
        /// First bytes without an owner.
        missing: Extent,
        /// The allocation they are in.
        allocation: Extent,
    },
    /// Two owners of one byte.
    #[error("overlap: {first} and {second} both claim {common}")]
    Overlap {
        /// What claims the lower address, e.g. `model_weight_extents[3]`.
        first: String,
        /// What claims the same bytes again.
        second: String,
        /// The bytes both claim.
        common: Extent,
    },
    /// An extent that is not inside the allocation it names.
    #[error("outside allocation: {what} {extent} is not inside an allocation at {allocation_ptr:#x}{hint}")]
    OutsideAllocation {
        /// Which extent, e.g. `residual_extents[0]`.
        what: String,
        /// The extent.
        extent: Extent,
        /// The allocation it names.
        allocation_ptr: u64,
        /// What was found instead.
        hint: String,
    },
    /// A size or a sum that is not what was committed.
    #[error("size changed: {what} is {found} bytes, expected {expected}")]
    SizeChanged {
        /// Which size.
        what: String,
        /// The committed value.
        expected: u64,
        /// The value found.
        found: u64,
    },
    /// Content or file identity that is not what was committed.
    #[error("identity changed: {what} is {found}, expected {expected}")]
    IdentityChanged {
        /// Which identity.
        what: String,
        /// The committed value.
        expected: String,
        /// The value found.
        found: String,
    },
    /// A payload at a path that its content does not justify.
    #[error(
        "path does not match digest: {path} holds or claims {digest}, whose only path is {}",
        digest.payload_path().display()
    )]
    PathDigestMismatch {
        /// The path found.
        path: PathBuf,
        /// The digest of the content there, or the digest recorded with it.
        digest: Digest,
    },
    /// Anything else that breaks the format.
    #[error("malformed: {what}: {problem}")]
    Malformed {
        /// Which field.
        what: String,
        /// What is wrong with it.
        problem: String,
    },
}

impl LayoutError {
    /// The stable name of the kind of error, as `coldsnap check --json` prints it.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Gap { .. } => "Gap",
            Self::Overlap { .. } => "Overlap",
            Self::OutsideAllocation { .. } => "OutsideAllocation",
            Self::SizeChanged { .. } => "SizeChanged",
            Self::IdentityChanged { .. } => "IdentityChanged",
            Self::PathDigestMismatch { .. } => "PathDigestMismatch",
            Self::Malformed { .. } => "Malformed",
        }
    }

    /// A [`Self::Malformed`] about `what`.
    pub fn malformed(what: impl Into<String>, problem: impl ToString) -> Self {
        Self::Malformed { what: what.into(), problem: problem.to_string() }
    }

    /// Fails with [`Self::SizeChanged`] unless the two are equal.
    ///
    /// # Errors
    /// When they differ.
    pub fn same_size(what: &str, expected: u64, found: u64) -> Result<(), Self> {
        if expected == found {
            return Ok(());
        }
        Err(Self::SizeChanged { what: what.to_owned(), expected, found })
    }
}

/// Who provides the bytes of a piece; the number is the position in the list given to the proof.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// `model_weight_extents[n]`: the pack.
    Model(usize),
    /// `residual_extents[n]`: the residual blob.
    Residual(usize),
}

impl Owner {
    fn name(self) -> String {
        match self {
            Self::Model(n) => format!("model_weight_extents[{n}]"),
            Self::Residual(n) => format!("residual_extents[{n}]"),
        }
    }
}

/// One extent with its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The bytes.
    pub extent: Extent,
    /// Who provides them.
    pub owner: Owner,
}

/// Allocations whose every byte has exactly one owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoveredLayout {
    allocations: Vec<Extent>,
    pieces: Vec<Piece>,
}

impl CoveredLayout {
    /// Proves the coverage rule. Each list holds `(ptr, size)` for an allocation and
    /// `(ptr, size, allocation_ptr)` for an extent, in any order.
    ///
    /// # Errors
    /// The first violation by kind: values that are no extent, overlapping allocations, extents outside
    /// their allocation, then the lowest overlap or gap.
    pub fn prove(
        allocations: &[(u64, u64)],
        model: &[(u64, u64, u64)],
        residual: &[(u64, u64, u64)],
    ) -> Result<Self, LayoutError> {
        let allocations = sorted_allocations(allocations)?;
        let mut pieces = Vec::with_capacity(model.len() + residual.len());
        let model = model.iter().enumerate().map(|(n, e)| (Owner::Model(n), e));
        let residual = residual.iter().enumerate().map(|(n, e)| (Owner::Residual(n), e));
        for (owner, &(ptr, size, allocation_ptr)) in model.chain(residual) {
            let extent = Extent::new(ptr, size).map_err(|e| bad_extent(&owner.name(), e))?;
            require_inside(&allocations, owner, extent, allocation_ptr)?;
            pieces.push(Piece { extent, owner });
        }
        pieces.sort_by_key(|piece| piece.extent);
        require_exact_cover(&allocations, &pieces)?;
        Ok(Self { allocations, pieces })
    }

    /// The allocations in address order.
    pub fn allocations(&self) -> &[Extent] {
        &self.allocations
    }

    /// All pieces in address order: disjoint, and together equal to the allocations.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }
}

fn bad_extent(what: &str, error: ExtentError) -> LayoutError {
    LayoutError::malformed(what, error)
}

fn sorted_allocations(allocations: &[(u64, u64)]) -> Result<Vec<Extent>, LayoutError> {
    let mut extents = Vec::with_capacity(allocations.len());
    for (n, &(ptr, size)) in allocations.iter().enumerate() {
        extents.push(Extent::new(ptr, size).map_err(|e| bad_extent(&format!("entries[{n}]"), e))?);
    }
    if let Some((first, second, common)) = super::first_overlap(&extents) {
        let (first, second) = (format!("entries[{first}]"), format!("entries[{second}]"));
        return Err(LayoutError::Overlap { first, second, common });
    }
    extents.sort();
    Ok(extents)
}

fn require_inside(
    allocations: &[Extent],
    owner: Owner,
    extent: Extent,
    allocation_ptr: u64,
) -> Result<(), LayoutError> {
    let outside = |hint: String| {
        Err(LayoutError::OutsideAllocation { what: owner.name(), extent, allocation_ptr, hint })
    };
    match allocations.binary_search_by_key(&allocation_ptr, |a| a.ptr()) {
        Ok(n) if allocations[n].contains(extent) => Ok(()),
        Ok(n) => outside(format!("; the allocation there is {}", allocations[n])),
        Err(_) => outside("; there is none".to_owned()),
    }
}

/// Walks allocations and pieces, both in address order. Every piece is known to be inside an allocation.
fn require_exact_cover(allocations: &[Extent], pieces: &[Piece]) -> Result<(), LayoutError> {
    let mut pieces = pieces.iter().peekable();
    let mut previous: Option<&Piece> = None;
    for &allocation in allocations {
        let mut covered = allocation.ptr();
        while let Some(piece) = pieces.next_if(|piece| piece.extent.ptr() < allocation.end()) {
            if let Some(first) = previous
                && let Some(common) = first.extent.intersection(piece.extent)
            {
                let (first, second) = (first.owner.name(), piece.owner.name());
                return Err(LayoutError::Overlap { first, second, common });
            }
            if let Ok(missing) = Extent::from_bounds(covered, piece.extent.ptr()) {
                return Err(LayoutError::Gap { missing, allocation });
            }
            covered = piece.extent.end();
            previous = Some(piece);
        }
        if let Ok(missing) = Extent::from_bounds(covered, allocation.end()) {
            return Err(LayoutError::Gap { missing, allocation });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BASE: u64 = 0x1000;

    fn kind(
        allocations: &[(u64, u64)],
        model: &[(u64, u64, u64)],
        residual: &[(u64, u64, u64)],
    ) -> Option<LayoutError> {
        CoveredLayout::prove(allocations, model, residual).err()
    }

    #[test]
    fn covered() {
        let layout = CoveredLayout::prove(
            &[(BASE + 200, 50), (BASE, 100)],
            &[(BASE + 10, 80, BASE), (BASE + 200, 50, BASE + 200)],
            &[(BASE + 90, 10, BASE), (BASE, 10, BASE)],
        )
        .unwrap();
        let owners: Vec<_> = layout.pieces().iter().map(|p| p.owner).collect();
        assert_eq!(owners, [Owner::Residual(1), Owner::Model(0), Owner::Residual(0), Owner::Model(1)]);
        assert_eq!(layout.allocations()[0].ptr(), BASE);
        CoveredLayout::prove(&[], &[], &[]).unwrap();
    }

    #[test]
    fn every_violation_has_its_kind_and_range() {
        let missing = |ptr, size| Extent::new(ptr, size).unwrap();
        let allocation = missing(BASE, 100);
        let one = [(BASE, 100)];
        assert_eq!(
            kind(&one, &[], &[(BASE, 40, BASE), (BASE + 50, 50, BASE)]),
            Some(LayoutError::Gap { missing: missing(BASE + 40, 10), allocation })
        );
        assert_eq!(
            kind(&one, &[(BASE + 7, 93, BASE)], &[]),
            Some(LayoutError::Gap { missing: missing(BASE, 7), allocation })
        );
        assert_eq!(
            kind(&one, &[(BASE, 93, BASE)], &[]),
            Some(LayoutError::Gap { missing: missing(BASE + 93, 7), allocation })
        );
        assert_eq!(kind(&one, &[], &[]), Some(LayoutError::Gap { missing: allocation, allocation }));
        assert_eq!(
            kind(&one, &[(BASE, 60, BASE)], &[(BASE + 50, 50, BASE)]),
            Some(LayoutError::Overlap {
                first: "model_weight_extents[0]".into(),
                second: "residual_extents[0]".into(),
                common: missing(BASE + 50, 10),
            })
        );
        for (extent, message) in [
            ((BASE, 101, BASE), "the allocation there is"),
            ((BASE + 50, 51, BASE), "the allocation there is"),
            ((BASE, 100, BASE + 1), "there is none"),
            ((BASE - 1, 100, BASE), "the allocation there is"),
        ] {
            let error = kind(&one, &[extent], &[]).unwrap();
            assert_eq!(error.kind(), "OutsideAllocation");
            assert!(error.to_string().contains(message), "{error}");
        }
        assert_eq!(kind(&[(BASE, 100), (BASE + 99, 5)], &[], &[]).unwrap().kind(), "Overlap");
        for bad in [(0, 100, BASE), (BASE, 0, BASE), (BASE, u64::MAX, BASE)] {
            assert_eq!(kind(&one, &[bad], &[]).unwrap().kind(), "Malformed");
        }
        assert_eq!(kind(&[(BASE, 0)], &[], &[]).unwrap().kind(), "Malformed");
    }

    /// `(ptr, size, allocation_ptr, model or residual)`
    type Owned = (u64, u64, u64, bool);

    /// Allocations cut into pieces, each with an owner: an exact cover by construction.
    fn covers() -> impl Strategy<Value = (Vec<(u64, u64)>, Vec<Owned>)> {
        let allocation = (1u64..50, proptest::collection::vec((1u64..100, any::<bool>()), 1..6));
        proptest::collection::vec(allocation, 1..6).prop_map(|list| {
            let (mut allocations, mut pieces, mut at) = (Vec::new(), Vec::new(), BASE);
            for (distance, cuts) in list {
                // Distance 1 makes neighbours that touch.
                at += distance - 1;
                let start = at;
                for (size, model) in cuts {
                    pieces.push((at, size, start, model));
                    at += size;
                }
                allocations.push((start, at - start));
            }
            (allocations, pieces)
        })
    }

    fn prove(allocations: &[(u64, u64)], pieces: &[Owned]) -> Result<CoveredLayout, LayoutError> {
        let side = |wanted: bool| -> Vec<_> {
            pieces.iter().filter(|p| p.3 == wanted).map(|&(ptr, size, start, _)| (ptr, size, start)).collect()
        };
        CoveredLayout::prove(allocations, &side(true), &side(false))
    }

    proptest! {
        #[test]
        fn exact_covers_are_proved_in_any_order((allocations, pieces) in covers()) {
            let layout = prove(&allocations, &pieces).unwrap();
            let (mut a, mut p) = (allocations, pieces);
            a.reverse();
            p.reverse();
            let reversed = prove(&a, &p).unwrap();
            prop_assert_eq!(layout.allocations(), reversed.allocations());
            prop_assert!(layout.pieces().windows(2).all(|w| w[0].extent.end() <= w[1].extent.ptr()));
        }

        #[test]
        fn every_hole_is_found((allocations, mut pieces) in covers(), pick in any::<proptest::sample::Index>(), part in any::<u64>()) {
            let n = pick.index(pieces.len());
            let (ptr, size, ..) = pieces[n];
            let removed = part % size + 1;
            let hole = if removed == size {
                pieces.remove(n);
                ptr
            } else {
                pieces[n].1 -= removed;
                ptr + size - removed
            };
            match prove(&allocations, &pieces) {
                Err(LayoutError::Gap { missing, .. }) => {
                    prop_assert_eq!((missing.ptr(), missing.size()), (hole, removed));
                }
                other => prop_assert!(false, "{:?}", other),
            }
        }

        #[test]
        fn every_second_owner_is_found((allocations, mut pieces) in covers(), pick in any::<proptest::sample::Index>(), at in any::<u64>(), size in any::<u64>(), model in any::<bool>()) {
            let (start, bytes) = allocations[pick.index(allocations.len())];
            let at = at % bytes;
            let size = size % (bytes - at) + 1;
            pieces.push((start + at, size, start, model));
            let error = prove(&allocations, &pieces).unwrap_err();
            prop_assert_eq!(error.kind(), "Overlap");
        }
    }
}
