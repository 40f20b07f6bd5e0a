//! The header of a `.gguf` file, versions 2 and 3: counts, metadata, tensor infos, then the aligned
//! data part. Metadata is skipped except for the alignment.

use super::error::HeaderError;
use super::{RawTensor, checked, ggml_types, to_index};

pub(super) const MAGIC: &[u8] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Header bytes that are read at most; vocabularies and chat templates take some ten MiB.
const MAX_HEADER: u64 = 256 << 20;
/// Dimensions of a tensor; ggml has four.
const MAX_DIMS: u32 = 8;
/// Nesting of metadata arrays; ggml writes none.
const MAX_NESTING: u32 = 8;
/// A tensor info without a name and dimensions: length of the name, dimensions, type, offset.
const MIN_INFO: u64 = 8 + 4 + 4 + 8;
/// A metadata pair with an empty key and the smallest value.
const MIN_PAIR: u64 = 8 + 4 + 1;

/// Metadata value types (the format's numbering).
mod value {
    pub const UINT32: u32 = 4;
    pub const STRING: u32 = 8;
    pub const ARRAY: u32 = 9;

    /// Bytes of a value of fixed size.
    pub fn size(value_type: u32) -> Option<u64> {
        match value_type {
            0 | 1 | 7 => Some(1), // u8, i8, bool
            2 | 3 => Some(2),     // u16, i16
            4..=6 => Some(4),     // u32, i32, f32
            10..=12 => Some(8),   // u64, i64, f64
            _ => None,
        }
    }
}

/// Reads the header of the whole file `data`.
pub(super) fn tensors(data: &[u8]) -> Result<Vec<RawTensor>, HeaderError> {
    let file_len = data.len() as u64;
    let mut reader = Reader { data: &data[..to_index(file_len.min(MAX_HEADER))], position: MAGIC.len() };
    let version = reader.u32("the version")?;
    if !matches!(version, 2 | 3) {
        return Err(HeaderError::Version { found: version });
    }
    let tensor_count = reader.u64("the tensor count")?;
    let pair_count = reader.u64("the metadata count")?;
    reader.bound("the tensor count", tensor_count, MIN_INFO)?;
    reader.bound("the metadata count", pair_count, MIN_PAIR)?;

    let mut alignment = DEFAULT_ALIGNMENT;
    for _ in 0..pair_count {
        let key = reader.string("a metadata key")?;
        let value_type = reader.u32("a metadata value's type")?;
        if key == b"general.alignment" {
            alignment = reader.alignment(value_type)?;
        } else {
            reader.skip_value(value_type, 0)?;
        }
    }

    let mut infos = Vec::with_capacity(to_index(tensor_count));
    for _ in 0..tensor_count {
        infos.push(reader.info(alignment)?);
    }
    let start = (reader.position as u64).next_multiple_of(alignment);

    // The length of a tensor of an unknown type: up to the next one, or to the end of the file.
    infos.sort_by_key(|info| info.offset);
    let next_offsets: Vec<u64> = infos.iter().map(|info| info.offset).skip(1).collect();
    let mut raw = Vec::with_capacity(infos.len());
    for (position, info) in infos.into_iter().enumerate() {
        let outside = |name, len| HeaderError::OutsideFile { name, offset: info.offset, len, file_len };
        let Some(offset) = start.checked_add(info.offset).filter(|&offset| offset <= file_len) else {
            return Err(outside(info.name, info.len.unwrap_or(0)));
        };
        let len = match info.len {
            Some(len) => len,
            None => match next_offsets.get(position) {
                Some(next) => next - info.offset,
                None => file_len - offset,
            },
        };
        raw.push(RawTensor { name: info.name, offset, len });
    }
    checked(raw, file_len)
}

/// A tensor info: `offset` from the start of the data part, `len` in bytes where the type is known.
struct Info {
    name: String,
    offset: u64,
    len: Option<u64>,
}

struct Reader<'a> {
    data: &'a [u8],
    position: usize,
}

impl<'a> Reader<'a> {
    fn bytes(&mut self, len: u64, what: &'static str) -> Result<&'a [u8], HeaderError> {
        let offset = self.position as u64;
        let rest = &self.data[self.position..];
        if len > rest.len() as u64 {
            return Err(HeaderError::Truncated { what, offset });
        }
        self.position += to_index(len);
        Ok(&rest[..to_index(len)])
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], HeaderError> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.bytes(N as u64, what)?);
        Ok(bytes)
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, HeaderError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, HeaderError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    fn string(&mut self, what: &'static str) -> Result<&'a [u8], HeaderError> {
        let len = self.u64(what)?;
        self.bytes(len, what)
    }

    /// Refuses a count of items that the rest of the header cannot hold.
    fn bound(&self, what: &'static str, found: u64, item: u64) -> Result<(), HeaderError> {
        let limit = (self.data.len() - self.position) as u64 / item;
        if found > limit {
            return Err(HeaderError::TooLarge { what, found, limit });
        }
        Ok(())
    }

    fn alignment(&mut self, value_type: u32) -> Result<u64, HeaderError> {
        let offset = self.position as u64;
        let invalid = |found| HeaderError::Invalid { what: "general.alignment", offset, found };
        if value_type != value::UINT32 {
            return Err(invalid(format!("value type {value_type}, expected uint32")));
        }
        let alignment = self.u32("general.alignment")?;
        if !alignment.is_power_of_two() {
            return Err(invalid(format!("{alignment} is not a power of two")));
        }
        Ok(alignment.into())
    }

    fn skip_value(&mut self, value_type: u32, nesting: u32) -> Result<(), HeaderError> {
        let offset = self.position as u64;
        if let Some(size) = value::size(value_type) {
            self.bytes(size, "a metadata value")?;
        } else if value_type == value::STRING {
            self.string("a metadata string")?;
        } else if value_type == value::ARRAY && nesting < MAX_NESTING {
            let element = self.u32("an array's element type")?;
            let count = self.u64("an array's length")?;
            // Every element has at least one byte, so that the loops below are bounded by the file.
            let size = value::size(element);
            self.bound("an array's length", count, size.unwrap_or(8))?;
            if let Some(size) = size {
                self.bytes(count * size, "an array")?;
            } else {
                for _ in 0..count {
                    self.skip_value(element, nesting + 1)?;
                }
            }
        } else {
            let found = format!("{value_type} at nesting {nesting}");
            return Err(HeaderError::Invalid { what: "a metadata value's type", offset, found });
        }
        Ok(())
    }

    fn info(&mut self, alignment: u64) -> Result<Info, HeaderError> {
        let at = self.position as u64;
        let name = self.string("a tensor's name")?;
        let name = std::str::from_utf8(name)
            .map_err(|error| HeaderError::Invalid {
                what: "a tensor's name",
                offset: at,
                found: error.to_string(),
            })?
            .to_owned();
        let dims = self.u32("a tensor's dimensions")?;
        if dims > MAX_DIMS {
            return Err(HeaderError::TooLarge {
                what: "the number of a tensor's dimensions",
                found: dims.into(),
                limit: MAX_DIMS.into(),
            });
        }
        let mut shape = Vec::new();
        for _ in 0..dims {
            shape.push(self.u64("a tensor's dimensions")?);
        }
        let ggml_type = self.u32("a tensor's type")?;
        let offset = self.u64("a tensor's offset")?;
        if offset % alignment != 0 {
            let found = format!("{offset} is not a multiple of {alignment}");
            return Err(HeaderError::Invalid { what: "a tensor's offset", offset: at, found });
        }
        let len = match ggml_types::block(ggml_type) {
            None => None,
            Some((elements, bytes)) => Some(byte_len(&shape, elements, bytes).ok_or_else(|| {
                let found = format!("shape {shape:?} has no size in blocks of {elements} elements");
                HeaderError::Shape { name: name.clone(), found }
            })?),
        };
        Ok(Info { name, offset, len })
    }
}

/// Bytes of a tensor; `None` when a row is no whole number of blocks or the product overflows.
fn byte_len(shape: &[u64], elements: u64, bytes: u64) -> Option<u64> {
    let row = shape.first().copied().unwrap_or(1);
    if row % elements != 0 {
        return None;
    }
    shape
        .iter()
        .skip(1)
        .try_fold((row / elements).checked_mul(bytes)?, |product, &dim| product.checked_mul(dim))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes a header with these metadata bytes (already encoded) and tensors
    /// (name, shape, type, offset), padded, followed by `payload` bytes of 7.
    fn file(pairs: &[Vec<u8>], tensors: &[(&str, &[u64], u32, u64)], payload: usize) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((tensors.len() as u64).to_le_bytes());
        out.extend((pairs.len() as u64).to_le_bytes());
        out.extend(pairs.concat());
        for (name, shape, ggml_type, offset) in tensors {
            out.extend(string(name));
            out.extend(u32::try_from(shape.len()).unwrap().to_le_bytes());
            shape.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
            out.extend(ggml_type.to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.resize(out.len() + payload, 7);
        out
    }

    fn string(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
    }

    fn pair(key: &str, value_type: u32, value: &[u8]) -> Vec<u8> {
        [string(key), value_type.to_le_bytes().to_vec(), value.to_vec()].concat()
    }

    fn array(element: u32, count: u64, items: &[u8]) -> Vec<u8> {
        [&element.to_le_bytes()[..], &count.to_le_bytes(), items].concat()
    }

    fn found(data: &[u8], payload: usize) -> Vec<(String, u64, u64)> {
        let start = (data.len() - payload) as u64;
        tensors(data).unwrap().into_iter().map(|t| (t.name, t.offset - start, t.len)).collect()
    }

    #[test]
    fn reads_infos_behind_any_metadata() {
        let pairs = [
            pair("a.bool", 7, &[1]),
            pair("a.u16", 2, &[1, 2]),
            pair("a.f32", 6, &[0; 4]),
            pair("a.u64", 10, &[0; 8]),
            pair("a.text", 8, &string("text")),
            pair("a.ids", 9, &array(5, 3, &[0; 12])),
            pair("a.words", 9, &array(8, 2, &[string("x"), string("")].concat())),
            pair("a.nested", 9, &array(9, 1, &array(0, 2, &[1, 2]))),
        ];
        // 512 elements of Q4_K are two blocks of 144 bytes; type 99 is unknown.
        let infos: [(&str, &[u64], u32, u64); 5] = [
            ("q", &[256, 2], 12, 0),
            ("scalar", &[], 0, 320),
            ("unknown", &[5], 99, 352),
            ("none", &[0, 5], 0, 384),
            ("last", &[5], 99, 384),
        ];
        let data = file(&pairs, &infos, 400);
        assert_eq!(
            found(&data, 400),
            [
                ("q".to_owned(), 0, 288),
                ("scalar".to_owned(), 320, 4),
                ("unknown".to_owned(), 352, 32),
                ("last".to_owned(), 384, 16)
            ]
        );
        let mut second = data;
        second[4] = 2;
        assert_eq!(found(&second, 400).len(), 4);
    }

    #[test]
    fn alignment_moves_the_data_part() {
        let pairs = [pair("general.alignment", 4, &4096u32.to_le_bytes())];
        let mut data = file(&pairs, &[("a", &[2], 0, 0), ("b", &[2], 0, 4096)], 0);
        data.resize(4096 + 4096 + 8, 1);
        let tensors = tensors(&data).unwrap();
        assert_eq!((tensors[0].offset, tensors[1].offset, tensors[1].len), (4096, 8192, 8));
    }

    #[test]
    fn refuses_malformed_headers() {
        let good = file(&[], &[("a", &[8], 0, 0)], 32);
        let with = |at: usize, bytes: &[u8]| {
            let mut data = good.clone();
            data[at..at + bytes.len()].copy_from_slice(bytes);
            data
        };
        let deep = (0..100_000).fold(Vec::new(), |mut inner, _| {
            inner.extend(array(9, 1, &[]));
            inner
        });
        for (data, expected) in [
            (with(4, &[1, 0, 0, 0]), "version 1 "),
            (with(4, &[0, 0, 0, 3]), "version 50331648 "),
            (with(8, &u64::MAX.to_le_bytes()), "the tensor count is 18446744073709551615"),
            (with(16, &u64::MAX.to_le_bytes()), "the metadata count is"),
            (with(24, &u64::MAX.to_le_bytes()), "ends inside a tensor's name"),
            (with(33, &9u32.to_le_bytes()), "the number of a tensor's dimensions is 9"),
            (with(37, &u64::MAX.to_le_bytes()), "has no size"),
            (with(49, &8u64.to_le_bytes()), "is not a multiple of 32"),
            (with(49, &(u64::MAX - 31).to_le_bytes()), "not inside the file"),
            (with(49, &32u64.to_le_bytes()), "not inside the file"),
            (with(32, &[0xff]), "a tensor's name at offset 24"),
            (good[..23].to_vec(), "ends inside the metadata count"),
            (good[..50].to_vec(), "ends inside a tensor's offset"),
            (good[..70].to_vec(), "not inside the file"),
            (file(&[], &[("a", &[31], 2, 0)], 32), "has no size in blocks of 32"),
            (file(&[], &[("a", &[8], 0, 0), ("a", &[8], 0, 32)], 64), "two tensors are named"),
            (file(&[], &[("a", &[9], 0, 0), ("b", &[8], 0, 32)], 64), "overlap"),
            (file(&[pair("general.alignment", 4, &[0; 4])], &[], 0), "0 is not a power of two"),
            (file(&[pair("general.alignment", 10, &[0; 8])], &[], 0), "value type 10"),
            (file(&[pair("k", 13, &[0; 64])], &[], 0), "a metadata value's type"),
            (file(&[pair("k", 9, &array(0, u64::MAX, &[]))], &[], 32), "an array's length is"),
            (file(&[pair("k", 9, &array(8, 1 << 40, &[]))], &[], 32), "an array's length is"),
            (file(&[pair("k", 9, &array(12, 1 << 61, &[]))], &[], 32), "an array's length is"),
            (file(&[pair("k", 9, &deep)], &[], 0), "9 at nesting 8"),
        ] {
            let text = tensors(&data).unwrap_err().to_string();
            assert!(text.contains(expected), "{text}, expected {expected}");
        }
    }

    #[test]
    fn known_types_have_whole_blocks() {
        let known = (0..100).filter_map(ggml_types::block).count();
        assert_eq!(known, 35);
        assert_eq!(byte_len(&[640, 3], 32, 34), Some(20 * 34 * 3));
        assert_eq!(byte_len(&[], 1, 4), Some(4));
    }
}
