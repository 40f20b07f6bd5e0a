//! How far two byte sequences agree, at the speed of the platform's memory comparison.

/// First block of a comparison; most comparisons that fail do so at once.
const FIRST_BLOCK: usize = 64;
/// Largest block: refining a difference inside it costs little against finding it.
const LAST_BLOCK: usize = 4096;

/// Length of the longest common prefix.
pub(super) fn common_prefix(a: &[u8], b: &[u8]) -> usize {
    let len = a.len().min(b.len());
    let (a, b) = (&a[..len], &b[..len]);
    let mut done = 0;
    let mut block = FIRST_BLOCK;
    while len - done >= block && a[done..done + block] == b[done..done + block] {
        done += block;
        block = (block * 2).min(LAST_BLOCK);
    }
    while let (Some(x), Some(y)) = (a[done..].first_chunk(), b[done..].first_chunk()) {
        let difference = u64::from_le_bytes(*x) ^ u64::from_le_bytes(*y);
        if difference != 0 {
            return done + difference.trailing_zeros() as usize / 8;
        }
        done += 8;
    }
    done + a[done..].iter().zip(&b[done..]).take_while(|(x, y)| x == y).count()
}

/// Length of the longest common suffix.
pub(super) fn common_suffix(a: &[u8], b: &[u8]) -> usize {
    let len = a.len().min(b.len());
    let (a, b) = (&a[a.len() - len..], &b[b.len() - len..]);
    let mut left = len;
    let mut block = FIRST_BLOCK;
    while left >= block && a[left - block..left] == b[left - block..left] {
        left -= block;
        block = (block * 2).min(LAST_BLOCK);
    }
    while let (Some(x), Some(y)) = (a[..left].last_chunk(), b[..left].last_chunk()) {
        let difference = u64::from_le_bytes(*x) ^ u64::from_le_bytes(*y);
        if difference != 0 {
            return len - left + difference.leading_zeros() as usize / 8;
        }
        left -= 8;
    }
    len - left + a[..left].iter().rev().zip(b[..left].iter().rev()).take_while(|(x, y)| x == y).count()
}

/// Length of the zero bytes at the beginning.
pub(super) fn leading_zeros(bytes: &[u8]) -> usize {
    let words = bytes.chunks_exact(8).take_while(|word| **word == [0; 8]).count() * 8;
    words + bytes[words..].iter().take_while(|byte| **byte == 0).count()
}

/// Whether every byte is zero.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    leading_zeros(bytes) == bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn prefix_and_suffix_are_exact(len in 0..20_000usize, more in 0..70usize, at in 0..20_000usize) {
            let a: Vec<u8> = (0..len).map(|i| (i * i).to_le_bytes()[0] ^ (i >> 8).to_le_bytes()[0]).collect();
            let mut b = a.clone();
            if at < len {
                b[at] ^= 0x40;
            }
            let expected = at.min(len);
            let longer = [&b[..], &vec![1; more]].concat();
            prop_assert_eq!(common_prefix(&a, &longer), expected);
            prop_assert_eq!(common_prefix(&longer, &a), expected);
            let longer = [&vec![1; more], &b[..]].concat();
            let expected = if at < len { len - at - 1 } else { len };
            prop_assert_eq!(common_suffix(&a, &longer), expected);
            prop_assert_eq!(common_suffix(&longer, &a), expected);
        }
    }

    #[test]
    fn zeros() {
        for len in [0, 1, 7, 8, 9, 100] {
            assert!(is_zero(&vec![0; len]));
            for at in 0..len {
                let mut bytes = vec![0; len];
                bytes[at] = 1;
                assert_eq!(leading_zeros(&bytes), at);
            }
        }
    }
}
