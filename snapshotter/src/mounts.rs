//! The mounts that containerd is asked to make. The overlay part equals that of containerd's own overlayfs
//! snapshotter; the payloads of a capsule follow as read-only binds of single files.

use std::path::{Path, PathBuf};

use crate::layer;
use crate::layout::Layout;
use crate::proto::Mount;
use crate::record::{Kind, Payload, Record};

/// Mounts of an active snapshot or view on `ancestors` (nearest first), then one bind per payload and the
/// path where its file lies. `options` are those of every overlay on this host.
pub fn build(
    layout: &Layout,
    options: &[String],
    record: &Record,
    ancestors: &[Record],
    payloads: &[(Payload, PathBuf)],
) -> Vec<Mount> {
    let mut mounts = vec![root(layout, options, record, ancestors, !payloads.is_empty())];
    mounts.extend(
        payloads.iter().map(|(payload, file)| Mount {
            target: layer::bind_target(payload),
            ..bind(file, &["bind", "ro"])
        }),
    );
    mounts
}

fn root(
    layout: &Layout,
    options: &[String],
    record: &Record,
    ancestors: &[Record],
    with_payloads: bool,
) -> Mount {
    let mut lower: Vec<_> = ancestors.iter().map(|a| layout.fs(a.id)).collect();
    match (record.info.kind, lower.as_slice()) {
        // Without a lower directory there is no overlay.
        (Kind::View, []) => return bind(&layout.fs(record.id), &["ro", "rbind"]),
        (_, []) => return bind(&layout.fs(record.id), &["rw", "rbind"]),
        // In a bind of the layer itself a payload's mount could propagate into the layer; an overlay with
        // the view's own empty directory at the bottom is a mount apart.
        (Kind::View, [_]) if with_payloads => lower.push(layout.fs(record.id)),
        (Kind::View, [only]) => return bind(only, &["ro", "rbind"]),
        _ => {}
    }
    let mut all = Vec::new();
    if record.info.kind == Kind::Active {
        all.push(format!("workdir={}", layout.work(record.id).display()));
        all.push(format!("upperdir={}", layout.fs(record.id).display()));
    }
    let lower: Vec<_> = lower.iter().map(|path| path.display().to_string()).collect();
    all.push(format!("lowerdir={}", lower.join(":")));
    all.extend_from_slice(options);
    Mount { r#type: "overlay".to_owned(), source: "overlay".to_owned(), target: String::new(), options: all }
}

fn bind(source: &Path, options: &[&str]) -> Mount {
    Mount {
        r#type: "bind".to_owned(),
        source: source.display().to_string(),
        target: String::new(),
        options: options.iter().map(|o| (*o).to_owned()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use coldsnap::digest::Digest;

    use super::*;
    use crate::record::Info;

    fn record(id: u64, kind: Kind) -> Record {
        Record { id, info: Info { kind, ..Info::default() }, ..Record::default() }
    }

    fn mounts(kind: Kind, parents: u64, payloads: &[(Payload, PathBuf)]) -> (String, Vec<Mount>) {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::create(dir.path()).unwrap();
        let ancestors: Vec<_> = (1..=parents).rev().map(|id| record(id, Kind::Committed)).collect();
        let options = ["index=off".to_owned()];
        let mounts = build(&layout, &options, &record(9, kind), &ancestors, payloads);
        (layout.snapshots().display().to_string(), mounts)
    }

    #[test]
    fn as_the_overlayfs_snapshotter() {
        for (kind, parents, kind_of_mount, source, options) in [
            (Kind::Active, 0, "bind", "S/9/fs", "rw rbind"),
            (Kind::View, 0, "bind", "S/9/fs", "ro rbind"),
            (Kind::View, 1, "bind", "S/1/fs", "ro rbind"),
            (Kind::View, 2, "overlay", "overlay", "lowerdir=S/2/fs:S/1/fs index=off"),
            (
                Kind::Active,
                1,
                "overlay",
                "overlay",
                "workdir=S/9/work upperdir=S/9/fs lowerdir=S/1/fs index=off",
            ),
            (
                Kind::Active,
                3,
                "overlay",
                "overlay",
                "workdir=S/9/work upperdir=S/9/fs lowerdir=S/3/fs:S/2/fs:S/1/fs index=off",
            ),
        ] {
            let (snapshots, mounts) = mounts(kind, parents, &[]);
            let expected = Mount {
                r#type: kind_of_mount.to_owned(),
                source: source.replace('S', &snapshots),
                target: String::new(),
                options: options
                    .replace("S/", &format!("{snapshots}/"))
                    .split(' ')
                    .map(str::to_owned)
                    .collect(),
            };
            assert_eq!(mounts, [expected], "{kind:?} on {parents}");
        }
    }

    #[test]
    fn payloads_follow_the_root() {
        let payload = Payload { worker: "w0".to_owned(), digest: Digest::of(b""), bytes: 0 };
        let file = PathBuf::from("/store/x.pack");
        let (snapshots, mounts) = mounts(Kind::View, 1, &[(payload, file)]);
        assert_eq!(mounts.len(), 2);
        assert_eq!(mounts[0].options[0], format!("lowerdir={snapshots}/1/fs:{snapshots}/9/fs"));
        assert_eq!(mounts[1].r#type, "bind");
        assert_eq!(mounts[1].source, "/store/x.pack");
        assert_eq!(mounts[1].target, "opt/coldsnap/capsule/hydration/w0/model-weights.pack");
        assert_eq!(mounts[1].options, ["bind", "ro"]);
    }

    #[test]
    fn workers_that_share_a_payload_have_a_bind_each() {
        let payload =
            |worker: &str| Payload { worker: worker.to_owned(), digest: Digest::of(b"x"), bytes: 1 };
        let file = PathBuf::from("/store/x.pack");
        let (_, mounts) = mounts(Kind::Active, 2, &[(payload("w7"), file.clone()), (payload("w8"), file)]);
        let binds: Vec<_> = mounts[1..].iter().map(|m| (m.source.as_str(), m.target.as_str())).collect();
        let target = ["w7", "w8"].map(|w| format!("opt/coldsnap/capsule/hydration/{w}/model-weights.pack"));
        assert_eq!(binds, [("/store/x.pack", target[0].as_str()), ("/store/x.pack", &target[1])]);
    }
}
