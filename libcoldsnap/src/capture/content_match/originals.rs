//! Tensors with the same content.

use std::collections::HashMap;

use super::super::checkpoint::{Checkpoint, Tensor};
use super::anchors::HASH;

/// For every tensor the first one with the same content, often itself. Engines that tie two tensors keep one
/// copy in memory, which must count as both.
pub(super) fn originals(checkpoint: &Checkpoint) -> Vec<usize> {
    let mut first = HashMap::new();
    let tensors = checkpoint.tensors();
    let original = |(position, tensor): (usize, &Tensor)| {
        let data = checkpoint.tensor_data(tensor);
        let candidate = *first.entry((data.len(), sample(data))).or_insert(position);
        // One comparison per tensor: contents that agree in the sample but differ stay apart.
        let same = candidate == position || checkpoint.tensor_data(&tensors[candidate]) == data;
        if same { candidate } else { position }
    };
    tensors.iter().enumerate().map(original).collect()
}

/// A hash of 64 words spread over the data.
fn sample(data: &[u8]) -> u64 {
    let step = (data.len() / 64).max(8);
    let samples = (0..data.len()).step_by(step).filter_map(|at| data[at..].first_chunk());
    samples.fold(0, |sum: u64, word| (sum.rotate_left(23) ^ u64::from_le_bytes(*word)).wrapping_mul(HASH))
}
