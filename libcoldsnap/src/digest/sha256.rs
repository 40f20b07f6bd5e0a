//! SHA-256 over a stream, alone or in step with a second one on the same core.
//!
//! Two streams in step give up to twice the rate of one where the processor has SHA instructions. Elsewhere the
//! crate `sha2` does the work and two streams take as long as one after the other.

use super::Digest;
#[cfg(target_arch = "x86_64")]
use super::sha_ni::ShaNi;

const BLOCK: usize = 64;

/// The first 32 bits of the fractional parts of the square roots of the first 8 primes (FIPS 180-4, 5.3.3).
const INITIAL: [u32; 8] =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

/// The digest of bytes that come in pieces.
#[derive(Debug, Clone)]
pub struct Sha256 {
    compressor: Compressor,
    state: [u32; 8],
    /// The last `len % 64` bytes are waiting at its beginning.
    partial: [u8; BLOCK],
    len: u64,
}

impl Default for Sha256 {
    fn default() -> Self {
        Self::with(Compressor::best())
    }
}

impl Sha256 {
    fn with(compressor: Compressor) -> Self {
        Self { compressor, state: INITIAL, partial: [0; BLOCK], len: 0 }
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        let rest = self.fill_partial(bytes);
        let (blocks, rest) = rest.as_chunks();
        self.compressor.compress(&mut self.state, blocks);
        self.keep(blocks.len(), rest);
    }

    /// Adds bytes to each of two streams, faster than one after the other.
    pub fn update_two(a: (&mut Self, &[u8]), b: (&mut Self, &[u8])) {
        let ((a, a_bytes), (b, b_bytes)) = (a, b);
        let (a_blocks, a_rest) = a.fill_partial(a_bytes).as_chunks();
        let (b_blocks, b_rest) = b.fill_partial(b_bytes).as_chunks();
        let both = a_blocks.len().min(b_blocks.len());
        let (a_now, a_later) = a_blocks.split_at(both);
        let (b_now, b_later) = b_blocks.split_at(both);
        a.compressor.compress_two((&mut a.state, a_now), (&mut b.state, b_now));
        a.compressor.compress(&mut a.state, a_later);
        b.compressor.compress(&mut b.state, b_later);
        a.keep(a_blocks.len(), a_rest);
        b.keep(b_blocks.len(), b_rest);
    }

    /// The digest of everything added.
    pub fn finish(mut self) -> Digest {
        let bits = self.len.wrapping_mul(8);
        let used = self.partial_len();
        // A one bit, zeros, and the length in the last eight bytes of a block.
        let mut end = [0; 2 * BLOCK];
        end[..used].copy_from_slice(&self.partial[..used]);
        end[used] = 0x80;
        let len = if used < BLOCK - 8 { BLOCK } else { 2 * BLOCK };
        end[len - 8..len].copy_from_slice(&bits.to_be_bytes());
        self.compressor.compress(&mut self.state, end[..len].as_chunks().0);
        let mut digest = [0; 32];
        for (bytes, word) in digest.chunks_exact_mut(4).zip(self.state) {
            bytes.copy_from_slice(&word.to_be_bytes());
        }
        Digest::from_bytes(digest)
    }

    #[expect(clippy::cast_possible_truncation, reason = "it is below 64")]
    const fn partial_len(&self) -> usize {
        (self.len % BLOCK as u64) as usize
    }

    /// Completes the block that waits and says what is left of the bytes; all of them when none waits.
    fn fill_partial<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let used = self.partial_len();
        if used == 0 {
            return bytes;
        }
        let (now, rest) = bytes.split_at(bytes.len().min(BLOCK - used));
        self.partial[used..used + now.len()].copy_from_slice(now);
        self.len += now.len() as u64;
        if used + now.len() == BLOCK {
            self.compressor.compress(&mut self.state, &[self.partial]);
        }
        rest
    }

    /// Counts compressed blocks, and keeps what is no whole block.
    fn keep(&mut self, blocks: usize, rest: &[u8]) {
        self.len += (blocks * BLOCK + rest.len()) as u64;
        if !rest.is_empty() {
            self.partial[..rest.len()].copy_from_slice(rest);
        }
    }
}

/// What compresses blocks.
#[derive(Debug, Clone, Copy)]
enum Compressor {
    #[cfg(target_arch = "x86_64")]
    ShaNi(ShaNi),
    Portable,
}

impl Compressor {
    fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(sha_ni) = ShaNi::detect() {
            return Self::ShaNi(sha_ni);
        }
        Self::Portable
    }

    fn compress(self, state: &mut [u32; 8], blocks: &[[u8; BLOCK]]) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::ShaNi(sha_ni) => sha_ni.compress(state, blocks),
            Self::Portable => sha2::block_api::compress256(state, blocks),
        }
    }

    /// Both have equally many blocks.
    fn compress_two(self, a: (&mut [u32; 8], &[[u8; BLOCK]]), b: (&mut [u32; 8], &[[u8; BLOCK]])) {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::ShaNi(sha_ni) => sha_ni.compress_two(a, b),
            Self::Portable => {
                self.compress(a.0, a.1);
                self.compress(b.0, b.1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sha2::Digest as _;

    use super::*;

    fn oracle(bytes: &[u8]) -> Digest {
        Digest::from_bytes(sha2::Sha256::digest(bytes).into())
    }

    fn bytes(len: usize, seed: u8) -> Vec<u8> {
        (0..len)
            .map(|n| (n % 251).to_le_bytes()[0].wrapping_mul(31) ^ seed ^ (n >> 8).to_le_bytes()[0])
            .collect()
    }

    fn compressors() -> [Compressor; 2] {
        [Compressor::best(), Compressor::Portable]
    }

    /// FIPS 180-4 examples, from NIST's "SHA256.pdf", and the empty message.
    #[test]
    fn published_digests() {
        let long = b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
        for (message, hex) in [
            (&b""[..], "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            (b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            (long, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"),
        ] {
            for compressor in compressors() {
                let mut sha256 = Sha256::with(compressor);
                sha256.update(message);
                assert_eq!(sha256.finish().hex(), hex);
            }
        }
    }

    #[test]
    fn every_length_around_blocks_alone_and_in_step() {
        let (a, b) = (bytes(300, 1), bytes(300, 2));
        for compressor in compressors() {
            for len in 0..a.len() {
                let mut alone = Sha256::with(compressor);
                alone.update(&a[..len]);
                assert_eq!(alone.finish(), oracle(&a[..len]), "{len} bytes");
                let (mut x, mut y) = (Sha256::with(compressor), Sha256::with(compressor));
                Sha256::update_two((&mut x, &a[..len]), (&mut y, &b[len..]));
                assert_eq!(x.finish(), oracle(&a[..len]), "{len} bytes beside {}", 300 - len);
                assert_eq!(y.finish(), oracle(&b[len..]), "{} bytes beside {len}", 300 - len);
            }
        }
    }

    proptest! {
        /// Pieces of any length, added alone or in step, in any order.
        #[test]
        fn splits_do_not_matter(
            a_len in 0usize..5000,
            b_len in 0usize..5000,
            steps in proptest::collection::vec((0usize..700, 0usize..700, 0u8..3), 0..40),
        ) {
            let (a, b) = (bytes(a_len, 3), bytes(b_len, 4));
            for compressor in compressors() {
                let (mut x, mut y) = (Sha256::with(compressor), Sha256::with(compressor));
                let (mut a_left, mut b_left) = (&a[..], &b[..]);
                for &(n, m, how) in &steps {
                    let (a_now, rest) = a_left.split_at(n.min(a_left.len()));
                    a_left = rest;
                    let (b_now, rest) = b_left.split_at(m.min(b_left.len()));
                    b_left = rest;
                    match how {
                        0 => Sha256::update_two((&mut x, a_now), (&mut y, b_now)),
                        1 => Sha256::update_two((&mut y, b_now), (&mut x, a_now)),
                        _ => {
                            x.update(a_now);
                            y.update(b_now);
                        }
                    }
                }
                Sha256::update_two((&mut x, a_left), (&mut y, b_left));
                prop_assert_eq!(x.finish(), oracle(&a));
                prop_assert_eq!(y.finish(), oracle(&b));
            }
        }
    }
}
