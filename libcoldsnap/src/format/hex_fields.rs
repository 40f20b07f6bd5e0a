//! How digests, checksums and nullable values are spelled inside manifests.

/// A digest as 64 lowercase hex digits without `sha256:`, as extents carry it.
pub(crate) mod plain_hex {
    use serde::{Deserialize, Deserializer, Serializer, de};

    use crate::digest::Digest;

    pub(crate) fn serialize<S: Serializer>(digest: &Digest, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&digest.hex())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Digest, D::Error> {
        let text = String::deserialize(deserializer)?;
        Digest::from_hex(&text)
            .map_err(|_| de::Error::custom(format!("{text:?} is not 64 lowercase hex digits")))
    }
}

/// A CRC-32 as 8 lowercase hex digits.
pub(crate) mod crc_hex {
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(crate) fn serialize<S: Serializer>(crc: &u32, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{crc:08x}"))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
        let text = String::deserialize(deserializer)?;
        let well_formed = text.len() == 8 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        well_formed
            .then(|| u32::from_str_radix(&text, 16).ok())
            .flatten()
            .ok_or_else(|| de::Error::custom(format!("{text:?} is not 8 lowercase hex digits")))
    }
}

/// A field that must be present and may be null. (`Option` alone would also accept its absence.)
pub(crate) mod nullable {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<T: Serialize, S: Serializer>(
        value: &Option<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.serialize(serializer)
    }

    pub(crate) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<T>, D::Error> {
        Option::deserialize(deserializer)
    }
}
