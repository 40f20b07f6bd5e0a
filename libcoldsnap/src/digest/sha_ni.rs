//! SHA-256 compression with the SHA instructions of x86-64, for one stream and for two streams in step.
//!
//! One stream waits for the latency of `sha256rnds2` most of the time; a second, independent one fills the gaps:
//! up to twice the bytes per second on one core. Each block asks for bytes that come later, because the
//! prefetchers of the hardware stop at the ends of pages, which halves the rate on memory with small pages.
//!
//! After Intel's "Intel SHA Extensions" (Gulley, Gopal, Yap, Feghali, Guilford, 2013) and FIPS 180-4.

use std::arch::x86_64::{
    __m128i, _MM_HINT_T0, _mm_add_epi32, _mm_alignr_epi8, _mm_blend_epi16, _mm_loadu_si128, _mm_prefetch,
    _mm_set_epi64x, _mm_sha256msg1_epu32, _mm_sha256msg2_epu32, _mm_sha256rnds2_epu32, _mm_shuffle_epi8,
    _mm_shuffle_epi32, _mm_storeu_si128,
};

/// How far ahead of the block that is compressed memory is asked for. Measured: 512 to 2048 are equal.
const PREFETCH_BYTES: usize = 1024;

/// The round constants: the first 32 bits of the fractional parts of the cube roots of the first 64 primes.
#[rustfmt::skip]
static K: [u32; 64] = [
    0x428a_2f98, 0x7137_4491, 0xb5c0_fbcf, 0xe9b5_dba5, 0x3956_c25b, 0x59f1_11f1, 0x923f_82a4, 0xab1c_5ed5,
    0xd807_aa98, 0x1283_5b01, 0x2431_85be, 0x550c_7dc3, 0x72be_5d74, 0x80de_b1fe, 0x9bdc_06a7, 0xc19b_f174,
    0xe49b_69c1, 0xefbe_4786, 0x0fc1_9dc6, 0x240c_a1cc, 0x2de9_2c6f, 0x4a74_84aa, 0x5cb0_a9dc, 0x76f9_88da,
    0x983e_5152, 0xa831_c66d, 0xb003_27c8, 0xbf59_7fc7, 0xc6e0_0bf3, 0xd5a7_9147, 0x06ca_6351, 0x1429_2967,
    0x27b7_0a85, 0x2e1b_2138, 0x4d2c_6dfc, 0x5338_0d13, 0x650a_7354, 0x766a_0abb, 0x81c2_c92e, 0x9272_2c85,
    0xa2bf_e8a1, 0xa81a_664b, 0xc24b_8b70, 0xc76c_51a3, 0xd192_e819, 0xd699_0624, 0xf40e_3585, 0x106a_a070,
    0x19a4_c116, 0x1e37_6c08, 0x2748_774c, 0x34b0_bcb5, 0x391c_0cb3, 0x4ed8_aa4a, 0x5b9c_ca4f, 0x682e_6ff3,
    0x748f_82ee, 0x78a5_636f, 0x84c8_7814, 0x8cc7_0208, 0x90be_fffa, 0xa450_6ceb, 0xbef9_a3f7, 0xc671_78f2,
];

/// Proof that this processor has the instructions.
#[derive(Debug, Clone, Copy)]
pub(super) struct ShaNi(());

impl ShaNi {
    /// The instructions, where the processor has them.
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("sha")
            && is_x86_feature_detected!("sse4.1")
            && is_x86_feature_detected!("ssse3"))
        .then_some(Self(()))
    }

    /// Compresses the blocks of one stream.
    pub(super) fn compress(self, state: &mut [u32; 8], blocks: &[[u8; 64]]) {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { compress(state, blocks) }
    }

    /// Compresses the blocks of two streams, as many as the shorter one has.
    pub(super) fn compress_two(
        self,
        (state_a, a): (&mut [u32; 8], &[[u8; 64]]),
        (state_b, b): (&mut [u32; 8], &[[u8; 64]]),
    ) {
        // SAFETY: `self` exists only where the processor has the instructions.
        unsafe { compress_two(state_a, a, state_b, b) }
    }
}

/// The eight words of a state in the order of the instructions.
#[derive(Clone, Copy)]
struct State {
    abef: __m128i,
    cdgh: __m128i,
}

impl State {
    #[target_feature(enable = "sha,sse4.1,ssse3")]
    #[inline]
    fn load(words: &[u32; 8]) -> Self {
        let (low, high) = words.split_at(4);
        // SAFETY: both halves are 16 readable bytes; the load needs no alignment.
        let (low, high) =
            unsafe { (_mm_loadu_si128(low.as_ptr().cast()), _mm_loadu_si128(high.as_ptr().cast())) };
        let (cdab, efgh) = (_mm_shuffle_epi32(low, 0xB1), _mm_shuffle_epi32(high, 0x1B));
        Self { abef: _mm_alignr_epi8(cdab, efgh, 8), cdgh: _mm_blend_epi16(efgh, cdab, 0xF0) }
    }

    #[target_feature(enable = "sha,sse4.1,ssse3")]
    #[inline]
    fn store(self, words: &mut [u32; 8]) {
        let (feba, dchg) = (_mm_shuffle_epi32(self.abef, 0x1B), _mm_shuffle_epi32(self.cdgh, 0xB1));
        let (low, high) = words.split_at_mut(4);
        // SAFETY: both halves are 16 writable bytes; the store needs no alignment.
        unsafe {
            _mm_storeu_si128(low.as_mut_ptr().cast(), _mm_blend_epi16(feba, dchg, 0xF0));
            _mm_storeu_si128(high.as_mut_ptr().cast(), _mm_alignr_epi8(dchg, feba, 8));
        }
    }

    #[target_feature(enable = "sha,sse4.1,ssse3")]
    #[inline]
    fn plus(self, other: Self) -> Self {
        Self { abef: _mm_add_epi32(self.abef, other.abef), cdgh: _mm_add_epi32(self.cdgh, other.cdgh) }
    }
}

/// The sixteen words of a block, most significant byte first.
#[target_feature(enable = "sha,sse4.1,ssse3")]
#[inline]
fn load_block(block: &[u8; 64]) -> [__m128i; 4] {
    let swap = _mm_set_epi64x(0x0c0d_0e0f_0809_0a0b, 0x0405_0607_0001_0203);
    // A hint about an address that may lie behind the end: it reads nothing and never faults.
    _mm_prefetch(block.as_ptr().wrapping_add(PREFETCH_BYTES).cast(), _MM_HINT_T0);
    // SAFETY: a block is 64 readable bytes; the load needs no alignment.
    let [a, b, c, d] = unsafe {
        let words: *const __m128i = block.as_ptr().cast();
        [
            _mm_loadu_si128(words),
            _mm_loadu_si128(words.add(1)),
            _mm_loadu_si128(words.add(2)),
            _mm_loadu_si128(words.add(3)),
        ]
    };
    [
        _mm_shuffle_epi8(a, swap),
        _mm_shuffle_epi8(b, swap),
        _mm_shuffle_epi8(c, swap),
        _mm_shuffle_epi8(d, swap),
    ]
}

/// Rounds 4n to 4n + 3 and the part of the message schedule that fits beside them. A macro, because the indices
/// must be constants for the words to stay in registers.
macro_rules! four_rounds {
    ($n:literal, $state:ident, $w:ident) => {{
        let (now, next, last) = ($n % 4, ($n + 1) % 4, ($n + 3) % 4);
        // SAFETY: four constants from 4n on lie within K for n below 16; the load needs no alignment.
        let constants = unsafe { _mm_loadu_si128(K.as_ptr().add(4 * $n).cast()) };
        let input = _mm_add_epi32($w[now], constants);
        $state.cdgh = _mm_sha256rnds2_epu32($state.cdgh, $state.abef, input);
        if $n >= 3 && $n <= 14 {
            let sum = _mm_add_epi32($w[next], _mm_alignr_epi8($w[now], $w[last], 4));
            $w[next] = _mm_sha256msg2_epu32(sum, $w[now]);
        }
        $state.abef = _mm_sha256rnds2_epu32($state.abef, $state.cdgh, _mm_shuffle_epi32(input, 0x0E));
        if $n >= 1 && $n <= 12 {
            $w[last] = _mm_sha256msg1_epu32($w[last], $w[now]);
        }
    }};
}

/// All rounds of one block for each (state, words) given.
macro_rules! rounds {
    (@one $n:literal [$(($state:ident, $w:ident))*]) => { $( four_rounds!($n, $state, $w); )* };
    (@each $lanes:tt $($n:literal)*) => { $( rounds!(@one $n $lanes); )* };
    ($($lane:tt)*) => { rounds!(@each [$($lane)*] 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15) };
}

#[target_feature(enable = "sha,sse4.1,ssse3")]
#[allow(unused_assignments, reason = "the last rounds of a block need no more words")]
fn compress(words: &mut [u32; 8], blocks: &[[u8; 64]]) {
    let mut state = State::load(words);
    for block in blocks {
        let before = state;
        let mut w = load_block(block);
        rounds!((state, w));
        state = state.plus(before);
    }
    state.store(words);
}

#[target_feature(enable = "sha,sse4.1,ssse3")]
#[allow(unused_assignments, reason = "the last rounds of a block need no more words")]
fn compress_two(words_a: &mut [u32; 8], a: &[[u8; 64]], words_b: &mut [u32; 8], b: &[[u8; 64]]) {
    let (mut state_a, mut state_b) = (State::load(words_a), State::load(words_b));
    for (block_a, block_b) in a.iter().zip(b) {
        let (before_a, before_b) = (state_a, state_b);
        let (mut w_a, mut w_b) = (load_block(block_a), load_block(block_b));
        rounds!((state_a, w_a)(state_b, w_b));
        state_a = state_a.plus(before_a);
        state_b = state_b.plus(before_b);
    }
    state_a.store(words_a);
    state_b.store(words_b);
}
