//! What a snapshot key tells: whether payloads may be mounted.
//!
//! containerd hands a proxy snapshotter keys of the form `<namespace>/<sequence>/<key of the client>`.
//! They are opaque but for two questions, which nothing else answers:
//!
//! * Does the snapshot receive a layer? The unpacker of the transfer service says so with a label; the one in
//!   the client library only by its key, `extract-<unique> <chain id>` (`core/snapshots` `UnpackKeyFormat`).
//! * Is a layer compared with the one below? For a committed snapshot the client library compares a view
//!   called `<snapshot>-view-<unique>` with one of its parent (`pkg/rootfs` `CreateDiff`). A payload in the
//!   former and not in the latter would become part of the layer.

/// Label that the unpacker of containerd sets on Prepare; its value is the chain id of the layer.
pub const SNAPSHOT_REF_LABEL: &str = "containerd.io/snapshot.ref";

/// Whether a Prepare with this key and these label names belongs to the unpacking of a layer.
pub fn is_unpack<'a>(key: &str, mut labels: impl Iterator<Item = &'a String>) -> bool {
    labels.any(|name| name == SNAPSHOT_REF_LABEL) || is_unpack_key(client_key(key))
}

/// Whether a view with this key is the upper side of a comparison of the layer `parent` with what is below it.
pub fn is_comparison(key: &str, parent: &str) -> bool {
    client_key(key).strip_prefix(client_key(parent)).is_some_and(|rest| rest.starts_with("-view-"))
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
    fn comparisons() {
        let parent = "default/12/sha256:ab";
        for (key, wanted) in [
            ("default/13/sha256:ab-view-12-abcd", true),
            ("default/13/sha256:ab-parent-view-12-abcd", false),
            ("default/13/sha256:abc-view-12-abcd", false),
            ("default/13/r1", false),
        ] {
            assert_eq!(is_comparison(key, parent), wanted, "{key}");
        }
    }

    #[test]
    fn the_label_decides_too() {
        assert!(is_unpack("default/1/r1", [SNAPSHOT_REF_LABEL.to_owned()].iter()));
        assert!(!is_unpack("default/1/r1", ["containerd.io/gc.root".to_owned()].iter()));
    }
}
