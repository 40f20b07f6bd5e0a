//! Coverage rule against an oracle that counts the owners of every byte.
#![no_main]

use coldsnap::extent::CoveredLayout;
use libfuzzer_sys::fuzz_target;

// Small numbers, so that inputs meet: allocations, then extents as (ptr, size, index of the allocation they name).
fuzz_target!(|input: (Vec<(u8, u8)>, Vec<(u8, u8, u8, bool)>)| {
    let (allocations, extents) = input;
    let allocations: Vec<(u64, u64)> = allocations.iter().map(|&(p, s)| (p.into(), s.into())).collect();
    let named = |n: u8| allocations.get(usize::from(n)).map_or(0, |a| a.0);
    let side = |model: bool| -> Vec<(u64, u64, u64)> {
        let mine = extents.iter().filter(|e| e.3 == model);
        mine.map(|&(p, s, n, _)| (p.into(), s.into(), named(n))).collect()
    };
    let (model, residual) = (side(true), side(false));
    let proved = CoveredLayout::prove(&allocations, &model, &residual).is_ok();

    let count = |list: &mut dyn Iterator<Item = (u64, u64)>| {
        let mut owners = [0u32; 512];
        list.for_each(|(p, s)| (p..p + s).for_each(|at| owners[usize::try_from(at).expect("small")] += 1));
        owners
    };
    let all = || model.iter().chain(&residual);
    let held = count(&mut allocations.iter().copied());
    let owned = count(&mut all().map(|e| (e.0, e.1)));
    let real = allocations.iter().copied().chain(all().map(|e| (e.0, e.1))).all(|(p, s)| p > 0 && s > 0);
    let inside = all().all(|e| {
        allocations.iter().any(|a| a.0 == e.2 && a.0 <= e.0 && e.0 + e.1 <= a.0 + a.1)
    });
    let expected = real && inside && held.iter().all(|n| *n <= 1) && held == owned;
    assert_eq!(proved, expected, "{allocations:?} {model:?} {residual:?}");
});
