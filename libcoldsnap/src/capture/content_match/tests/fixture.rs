//! Checkpoints and memory for the tests.

use tempfile::TempDir;

use crate::capture::checkpoint::Checkpoint;

#[derive(Clone, Copy, Debug)]
pub enum Format {
    /// Tensors follow each other without padding, from any file offset.
    Safetensors,
    /// Tensors lie at multiples of 32.
    Gguf,
}

/// A checkpoint of one file with tensors `t0`, `t1`, ... in this order; it lives as long as the directory.
pub fn checkpoint(format: Format, contents: &[Vec<u8>]) -> (TempDir, Checkpoint) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model");
    let file = match format {
        Format::Safetensors => safetensors(contents),
        Format::Gguf => gguf(contents),
    };
    std::fs::write(&path, file).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    (dir, checkpoint)
}

fn safetensors(contents: &[Vec<u8>]) -> Vec<u8> {
    let mut end = 0;
    let entries: Vec<String> = (contents.iter().enumerate())
        .map(|(name, content)| {
            let (start, len) = (end, content.len());
            end += len;
            format!(r#""t{name}":{{"dtype":"U8","shape":[{len}],"data_offsets":[{start},{end}]}}"#)
        })
        .collect();
    let header = format!("{{{}}}", entries.join(","));
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(contents.concat());
    file
}

fn gguf(contents: &[Vec<u8>]) -> Vec<u8> {
    let mut file = b"GGUF\x03\0\0\0".to_vec();
    file.extend((contents.len() as u64).to_le_bytes());
    file.extend(0u64.to_le_bytes());
    let mut offset = 0;
    for (name, content) in contents.iter().enumerate() {
        let name = format!("t{name}");
        file.extend((name.len() as u64).to_le_bytes());
        file.extend(name.as_bytes());
        file.extend(1u32.to_le_bytes());
        file.extend((content.len() as u64).to_le_bytes());
        file.extend(24u32.to_le_bytes());
        file.extend((offset as u64).to_le_bytes());
        offset += content.len().next_multiple_of(32);
    }
    for content in contents {
        place(&mut file, 32, content);
    }
    file
}

/// Appends `content` at the next multiple of `alignment`, behind zeros.
pub fn place(memory: &mut Vec<u8>, alignment: usize, content: &[u8]) {
    memory.resize(memory.len().next_multiple_of(alignment), 0);
    memory.extend(content);
}

/// Bytes without repetition, the same for the same seed (SplitMix64).
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x5851_F42D_4C95_7F2D);
    let words = std::iter::repeat_with(|| {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)).to_le_bytes()
    });
    words.flatten().take(len).collect()
}
