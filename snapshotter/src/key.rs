//! What a snapshot key tells: whether a layer is being unpacked into the snapshot.
//!
//! containerd hands a proxy snapshotter keys of the form `<namespace>/<sequence>/<key of the client>`.
//! They are opaque but for one question: into a snapshot that receives a layer no payload may be mounted.
//! The unpacker of the transfer service says so with a label; the one in the client library says so only
//! by its key, `extract-<unique> <chain id>` (containerd `core/snapshots` `UnpackKeyFormat`).

/// Label that the unpacker of containerd sets on Prepare; its value is the chain id of the layer.
pub const SNAPSHOT_REF_LABEL: &str = "containerd.io/snapshot.ref";

/// Whether a Prepare with this key and these label names belongs to the unpacking of a layer.
pub fn is_unpack<'a>(key: &str, mut labels: impl Iterator<Item = &'a String>) -> bool {
    labels.any(|name| name == SNAPSHOT_REF_LABEL) || is_unpack_key(client_key(key))
}

/// The part of `<namespace>/<sequence>/<key>` that the client chose; a key of another form as it is.
fn client_key(key: &str) -> &str {
    let mut parts = key.splitn(3, '/');
    match (parts.next(), parts.next(), parts.next()) {
        (Some(_), Some(sequence), Some(rest))
            if !sequence.is_empty() && sequence.bytes().all(|b| b.is_ascii_digit()) =>
        {
            rest
        }
        _ => key,
    }
}

fn is_unpack_key(key: &str) -> bool {
    // No container id holds a blank, so that a container called "extract-1" is not mistaken.
    key.strip_prefix("extract-")
        .and_then(|rest| rest.split_once(' '))
        .is_some_and(|(unique, chain)| !unique.is_empty() && chain.contains(':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpack_keys() {
        let chain = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        for (key, wanted) in [
            (format!("default/12/extract-123456789-aB_- {chain}"), true),
            (format!("k8s.io/1/extract-1-abcd {chain}"), true),
            (format!("extract-1-abcd {chain}"), true),
            (format!("default/12/{chain}"), false),
            (format!("default/12/{chain}-view-1-abcd"), false),
            (format!("default/x/extract-1-abcd {chain}"), false),
            ("default/12/extract-1".to_owned(), false),
            ("default/12/extract-1-abcd".to_owned(), false),
            ("default/12/extract- x:y".to_owned(), false),
            ("default/12/r1".to_owned(), false),
            ("extract".to_owned(), false),
            (String::new(), false),
        ] {
            assert_eq!(is_unpack(&key, [].iter()), wanted, "{key}");
        }
    }

    #[test]
    fn the_label_decides_too() {
        assert!(is_unpack("default/1/r1", [SNAPSHOT_REF_LABEL.to_owned()].iter()));
        assert!(!is_unpack("default/1/r1", ["containerd.io/gc.root".to_owned()].iter()));
    }
}
