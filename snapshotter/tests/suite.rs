//! The cases of containerd's snapshotter test suite (`core/snapshots/testsuite`), written again from what
//! they show, against the real service and with real overlay mounts. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests")]

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use coldsnap_snapshotter::proto::v1::{Info, Kind};
use common::{Node, mount, tree};
use tonic::Code;

/// One layer's changes.
type Change = Box<dyn Fn(&Path)>;

fn code<T: std::fmt::Debug>(result: Result<T, tonic::Status>) -> Code {
    result.expect_err("this must be refused").code()
}

/// Commits one snapshot per change on top of each other; after each, a view must show what the same changes
/// make of a plain directory.
fn check_layers(changes: Vec<Change>) {
    let mut node = Node::start();
    let flat = node.new_directory();
    let mut parent = String::new();
    for (n, change) in changes.iter().enumerate() {
        let name = format!("layer-{n}");
        node.layer(&name, &parent, |root| change(root));
        change(&flat);
        let mounts = node.view("look", &name).unwrap();
        let target = node.new_directory();
        mount::with(&mounts, &target, |root| assert_eq!(tree::read(root), tree::read(&flat), "{name}"));
        node.remove("look").unwrap();
        parent = name;
    }
    node.remove_all_and_check();
}

#[test]
fn basic() {
    let mut node = Node::start();
    let first = |root: &Path| {
        tree::file(root.join("foo"), "foo\n", 0o777);
        tree::directory(root.join("a"), 0o755);
        tree::directory(root.join("a/b"), 0o755);
        tree::directory(root.join("a/b/c"), 0o755);
    };
    let second = |root: &Path| {
        tree::file(root.join("bar"), "bar\n", 0o777);
        tree::file(root.join("foo"), "bar\n", 0o777);
        fs::remove_dir_all(root.join("a/b")).unwrap();
    };
    let flat = node.new_directory();

    let mounts = node.prepare("preparing", "").unwrap();
    let target = node.new_directory();
    mount::with(&mounts, &target, first);
    node.commit("committed", "preparing").unwrap();
    first(&flat);
    let committed = node.stat("committed").unwrap();
    assert_eq!((committed.parent.as_str(), committed.kind()), ("", Kind::Committed));
    assert_eq!(code(node.stat("preparing")), Code::NotFound);

    let mounts = node.prepare("next", "committed").unwrap();
    mount::with(&mounts, &target, |root| {
        assert_eq!(tree::read(root), tree::read(&flat));
        second(root);
    });
    second(&flat);
    let next = node.stat("next").unwrap();
    assert_eq!((next.parent.as_str(), next.kind()), ("committed", Kind::Active));
    node.commit("committed-next", "next").unwrap();
    let next = node.stat("committed-next").unwrap();
    assert_eq!((next.parent.as_str(), next.kind()), ("committed", Kind::Committed));

    let mut listed = node.list(&[]).unwrap();
    listed.sort_by(|a, b| a.name.cmp(&b.name));
    assert_eq!(listed, [committed, next]);

    let mounts = node.view("view", "committed-next").unwrap();
    mount::with(&mounts, &target, |root| assert_eq!(tree::read(root), tree::read(&flat)));
    node.remove("view").unwrap();
    let error = node.remove("committed").unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.message().contains("remove"), "{error}");
    node.remove("committed-next").unwrap();
    node.remove("committed").unwrap();
    node.remove_all_and_check();
}

#[test]
fn mounts_are_answered_again() {
    let mut node = Node::start();
    let active = node.prepare("a", "").unwrap();
    assert_eq!(node.mounts("a").unwrap(), active);
    node.commit("c", "a").unwrap();
    assert_eq!(code(node.mounts("c")), Code::FailedPrecondition);
    let view = node.view("v", "c").unwrap();
    assert_eq!(node.mounts("v").unwrap(), view);
    let child = node.prepare("b", "c").unwrap();
    assert_eq!(node.mounts("b").unwrap(), child);
    assert_eq!(code(node.mounts("nothing")), Code::NotFound);
}

#[test]
fn stat_active_and_committed() {
    let mut node = Node::start();
    node.prepare("preparing", "").unwrap();
    let info = node.stat("preparing").unwrap();
    assert_eq!((info.name.as_str(), info.parent.as_str(), info.kind()), ("preparing", "", Kind::Active));
    node.commit("committed", "preparing").unwrap();
    let info = node.stat("committed").unwrap();
    assert_eq!((info.name.as_str(), info.parent.as_str(), info.kind()), ("committed", "", Kind::Committed));
}

#[test]
fn transitivity() {
    let mut node = Node::start();
    node.layer("a", "", |root| tree::file(root.join("foo"), "foo\n", 0o777));
    node.layer("b", "a", |root| tree::file(root.join("foo"), "foo bar\n", 0o777));
    assert_eq!(node.stat("a").unwrap().parent, "");
    let parent = node.stat("b").unwrap().parent;
    assert_eq!(parent, "a");
    assert_eq!(node.stat(&parent).unwrap().parent, "");
}

#[test]
fn keys_and_parents_are_checked() {
    let mut node = Node::start();
    node.layer("a", "", |_| {});
    node.prepare("key", "a").unwrap();
    assert_eq!(code(node.prepare("key", "a")), Code::AlreadyExists);
    assert_eq!(code(node.view("key", "a")), Code::AlreadyExists);
    assert_eq!(code(node.prepare("a", "")), Code::AlreadyExists);
    assert_eq!(code(node.view("a", "a")), Code::AlreadyExists);
    assert_eq!(code(node.prepare("new", "nothing")), Code::NotFound);
    assert_eq!(code(node.view("new", "nothing")), Code::NotFound);
    assert_eq!(code(node.prepare("new", "key")), Code::InvalidArgument);
    assert_eq!(code(node.prepare("", "a")), Code::InvalidArgument);
    assert_eq!(code(node.stat("new")), Code::NotFound);
    assert_eq!(code(node.remove("new")), Code::NotFound);
    assert_eq!(code(node.usage("new")), Code::NotFound);
    let shifted = [("containerd.io/snapshot/uidmapping", "0:100000:65536")];
    assert_eq!(code(node.prepare_labelled("new", "a", &shifted)), Code::Unimplemented);
    node.remove_all_and_check();
}

#[test]
fn commit_is_checked() {
    let mut node = Node::start();
    node.prepare("one", "").unwrap();
    node.prepare("two", "").unwrap();
    node.commit("committed", "one").unwrap();
    assert_eq!(code(node.commit("committed", "one")), Code::AlreadyExists);
    assert_eq!(code(node.commit("committed", "two")), Code::AlreadyExists);
    assert_eq!(code(node.commit("other", "one")), Code::NotFound);
    assert_eq!(code(node.commit("other", "committed")), Code::FailedPrecondition);
    assert_eq!(code(node.commit("", "two")), Code::InvalidArgument);
    node.view("view", "committed").unwrap();
    assert_eq!(code(node.commit("other", "view")), Code::FailedPrecondition);
    // What was refused changed nothing.
    assert_eq!(node.stat("two").unwrap().kind(), Kind::Active);
    node.commit("two", "two").expect_err("the name is taken by the key itself");
    node.commit("second", "two").unwrap();
    node.remove_all_and_check();
}

#[test]
fn commit_on_another_parent() {
    let mut node = Node::start();
    node.layer("base", "", |root| tree::file(root.join("base"), "", 0o644));
    node.layer("other", "", |_| {});
    let mounts = node.prepare("apart", "").unwrap();
    let target = node.new_directory();
    mount::with(&mounts, &target, |root| tree::file(root.join("top"), "", 0o644));
    assert_eq!(code(node.commit_with("top", "apart", "nothing", &[])), Code::NotFound);
    node.prepare("active", "base").unwrap();
    assert_eq!(code(node.commit_with("top", "apart", "active", &[])), Code::FailedPrecondition);
    assert_eq!(code(node.commit_with("top", "active", "other", &[])), Code::InvalidArgument);
    node.commit_with("same", "active", "base", &[]).unwrap();
    node.commit_with("top", "apart", "base", &[]).unwrap();
    assert_eq!(node.stat("top").unwrap().parent, "base");
    assert_eq!(code(node.remove("base")), Code::FailedPrecondition);
    let mounts = node.view("view", "top").unwrap();
    mount::with(&mounts, &target, |root| {
        assert_eq!(tree::read(root).into_keys().collect::<Vec<_>>(), [Path::new("base"), Path::new("top")]);
    });
    node.remove_all_and_check();
}

#[test]
fn remove_frees_names_and_then_space() {
    let mut node = Node::start();
    node.prepare("committed-a", "").unwrap();
    node.commit("committed-1", "committed-a").unwrap();
    node.prepare("reuse-1", "committed-1").unwrap();
    node.remove("reuse-1").unwrap();
    node.view("reuse-1", "committed-1").unwrap();
    node.remove("reuse-1").unwrap();
    node.prepare("reuse-1", "").unwrap();
    node.remove("committed-1").unwrap();
    node.commit("committed-1", "reuse-1").unwrap();

    let directories = |node: &Node| fs::read_dir(node.root().join("snapshots")).unwrap().count();
    assert_eq!(directories(&node), 4, "removal leaves the space to Cleanup");
    node.cleanup().unwrap();
    assert_eq!(directories(&node), 1);
    node.cleanup().unwrap();
    node.remove_all_and_check();
}

#[test]
fn an_intermediate_snapshot_stays() {
    let mut node = Node::start();
    node.layer("base", "", |_| {});
    node.layer("inter", "base", |_| {});
    node.prepare("top", "inter").unwrap();
    assert_eq!(code(node.remove("inter")), Code::FailedPrecondition);
    assert_eq!(code(node.remove("base")), Code::FailedPrecondition);
    node.remove("top").unwrap();
    node.remove("inter").unwrap();
    node.remove("base").unwrap();
}

fn base_snapshots(node: &mut Node) {
    node.prepare("c1-a", "").unwrap();
    node.commit("c1", "c1-a").unwrap();
    node.prepare("c2-a", "c1").unwrap();
    node.commit("c2", "c2-a").unwrap();
    node.prepare("a1", "c2").unwrap();
    node.prepare("a2", "").unwrap();
    node.view("v1", "c2").unwrap();
    node.view("v2", "").unwrap();
}

fn labels(pairs: &[(&str, &str)]) -> std::collections::HashMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

fn nanos(time: Option<prost_types::Timestamp>) -> i128 {
    let time = time.unwrap();
    i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanos)
}

fn now() -> i128 {
    i128::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos()).unwrap()
}

#[test]
fn update_changes_labels_and_nothing_else() {
    let mut node = Node::start();
    let before = now();
    base_snapshots(&mut node);
    let after = now();
    for (name, kind, parent) in [
        ("c1", Kind::Committed, ""),
        ("c2", Kind::Committed, "c1"),
        ("a1", Kind::Active, "c2"),
        ("a2", Kind::Active, ""),
        ("v1", Kind::View, "c2"),
        ("v2", Kind::View, ""),
    ] {
        let info = node.stat(name).unwrap();
        assert!((before..=after).contains(&nanos(info.created_at)), "{name}");
        assert_eq!(info.created_at, info.updated_at);
        assert_eq!((info.kind(), info.parent.as_str()), (kind, parent));

        let created = info.created_at;
        let all = [("l1", "v1"), ("l2", "v2"), ("l3", "v3")];
        let mut wanted = Info { parent: "does not exist".to_owned(), labels: labels(&all), ..info };
        wanted.set_kind(Kind::Unknown);
        let start = now();
        let info = node.update(wanted, &[]).unwrap();
        assert_eq!(info.created_at, created);
        assert!((start..=now()).contains(&nanos(info.updated_at)), "{name}");
        assert_eq!((info.kind(), info.parent.as_str()), (kind, parent));
        assert_eq!(info.labels, labels(&all));
        assert_eq!(node.stat(name).unwrap(), info);

        let wanted = Info { labels: labels(&[("l1", "updated"), ("l4", "v4")]), ..info };
        let info = node.update(wanted, &["labels.l1", "labels.l2"]).unwrap();
        assert_eq!(info.labels, labels(&[("l1", "updated"), ("l3", "v3")]));

        let wanted = Info { labels: labels(&[("l4", "v4"), ("empty", "")]), ..info };
        let info = node.update(wanted, &["labels"]).unwrap();
        assert_eq!(info.labels, labels(&[("l4", "v4")]));

        for path in ["parent", "name", "kind", "created_at", "label"] {
            assert_eq!(code(node.update(info.clone(), &[path])), Code::InvalidArgument);
        }
        assert_eq!(node.stat(name).unwrap(), info);
    }
    let missing = Info { name: "nothing".to_owned(), ..Info::default() };
    assert_eq!(code(node.update(missing, &[])), Code::NotFound);
}

#[test]
fn committed_labels_replace_prepared_ones() {
    let mut node = Node::start();
    node.prepare_labelled("a", "", &[("prepared", "1"), ("empty", "")]).unwrap();
    assert_eq!(node.stat("a").unwrap().labels, labels(&[("prepared", "1")]));
    node.commit_with("c", "a", "", &[("committed", "1")]).unwrap();
    assert_eq!(node.stat("c").unwrap().labels, labels(&[("committed", "1")]));
}

#[test]
fn walk_with_filters() {
    let mut node = Node::start();
    let root = ("containerd.io/gc.root", "check-walk");
    node.prepare_labelled("a-np", "", &[root]).unwrap();
    node.prepare_labelled("p-tmp", "", &[root]).unwrap();
    node.commit_with("p", "p-tmp", "", &[root]).unwrap();
    node.prepare_labelled("a", "p", &[root]).unwrap();
    node.view_labelled("v", "p", &[root]).unwrap();
    node.prepare_labelled("p-wl-tmp", "", &[root]).unwrap();
    node.commit_with("p-wl", "p-wl-tmp", "", &[root, ("l", "1")]).unwrap();
    node.prepare_labelled("a-wl", "p-wl", &[root, ("l", "2")]).unwrap();
    node.view_labelled("v-wl", "p-wl", &[root, ("l", "3")]).unwrap();
    node.prepare_labelled("a-np-wl", "", &[root, ("l", "2")]).unwrap();
    for (filters, wanted) in [
        (vec![], "a a-np a-np-wl a-wl p p-wl v v-wl"),
        (vec![r#"labels."containerd.io/gc.root"==check-walk"#], "a a-np a-np-wl a-wl p p-wl v v-wl"),
        (vec![r#"kind==active,labels."containerd.io/gc.root"==check-walk"#], "a a-np a-np-wl a-wl"),
        (vec!["kind==view"], "v v-wl"),
        (vec!["kind==committed"], "p p-wl"),
        (vec!["name==p", "name==a-np-wl"], "a-np-wl p"),
        (vec!["name==a-wl,labels.l"], "a-wl"),
        (vec!["parent==p"], "a v"),
        (vec![r#"parent!="""#], "a a-wl v v-wl"),
        (vec!["labels.l"], "a-np-wl a-wl p-wl v-wl"),
        (vec!["labels.l==2"], "a-np-wl a-wl"),
        (vec!["labels.l!=2,kind==view"], "v v-wl"),
        (vec!["name~=^a-"], "a-np a-np-wl a-wl"),
        (vec!["name==nothing"], ""),
    ] {
        assert_eq!(node.names(&filters).join(" "), wanted, "{filters:?}");
    }
    assert_eq!(code(node.list(&["name=p"])), Code::InvalidArgument);
}

#[test]
fn a_long_list_comes_in_blocks_and_equals_stat() {
    let mut node = Node::start();
    for n in 0..230 {
        node.prepare_labelled(&format!("key-{n:03}"), "", &[("n", &n.to_string())]).unwrap();
    }
    let infos = node.list(&[]).unwrap();
    assert_eq!(infos.len(), 230);
    for info in infos {
        assert_eq!(node.stat(&info.name).unwrap(), info);
    }
}

#[test]
fn a_view_is_read_only() {
    for layers in [1, 2] {
        let mut node = Node::start();
        let mut parent = String::new();
        for n in 0..layers {
            let name = format!("c{n}");
            node.layer(&name, &parent, |_| {});
            parent = name;
        }
        let mounts = node.view("view", &parent).unwrap();
        let target = node.new_directory();
        mount::with(&mounts, &target, |root| {
            let error = fs::write(root.join("file"), "x").unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem, "{layers}");
        });
        node.remove_all_and_check();
    }
}

#[test]
fn the_root_directory_is_open_to_all_and_keeps_its_owner() {
    let mut node = Node::start();
    let target = node.new_directory();
    let mounts = node.prepare("a", "").unwrap();
    mount::with(&mounts, &target, |root| {
        assert_eq!(fs::metadata(root).unwrap().permissions().mode() & 0o7777, 0o755);
        chown(root, Some(12), Some(34)).unwrap();
    });
    node.commit("c", "a").unwrap();
    let mounts = node.prepare("b", "c").unwrap();
    mount::with(&mounts, &target, |root| {
        let metadata = fs::metadata(root).unwrap();
        assert_eq!((metadata.uid(), metadata.gid(), metadata.mode() & 0o7777), (12, 34, 0o755));
    });
}

#[test]
fn usage_counts_the_layer_alone() {
    let mut node = Node::start();
    let write = |bytes: usize| {
        move |root: &Path| {
            let file = fs::File::create(root.join(bytes.to_string())).unwrap();
            std::io::Write::write_all(&mut &file, &vec![1; bytes]).unwrap();
            file.sync_all().unwrap();
        }
    };
    node.layer("base", "", write(1 << 20));
    let (size, inodes) = node.usage("base").unwrap();
    assert!((1 << 20..(1 << 20) + (64 << 10)).contains(&size), "{size}");
    assert_eq!(inodes, 2);
    node.view("view", "base").unwrap();
    assert_eq!(node.usage("view").unwrap(), (0, 0));

    let mounts = node.prepare("active", "base").unwrap();
    let target = node.new_directory();
    mount::with(&mounts, &target, write(300_000));
    let active = node.usage("active").unwrap();
    assert!((300_000..400_000).contains(&active.0), "{active:?}");
    assert_eq!(active.1, 2);
    node.commit("top", "active").unwrap();
    assert_eq!(node.usage("top").unwrap(), active);
}

#[test]
fn layer_file_update() {
    check_layers(vec![
        Box::new(|root| {
            tree::directory(root.join("etc"), 0o700);
            tree::file(root.join("etc/hosts"), "mydomain 10.0.0.1", 0o644);
            tree::file(root.join("etc/profile"), "PATH=/usr/bin", 0o644);
        }),
        Box::new(|root| {
            tree::file(root.join("etc/hosts"), "mydomain 10.0.0.2", 0o644);
            tree::file(root.join("etc/profile"), "PATH=/usr/bin", 0o666);
            tree::directory(root.join("root"), 0o700);
            tree::file(root.join("root/.bashrc"), "PATH=/usr/sbin:/usr/bin", 0o644);
        }),
    ]);
}

#[test]
fn a_directory_of_a_lower_layer_is_replaced() {
    check_layers(vec![
        Box::new(|root| {
            tree::directory(root.join("lib"), 0o700);
            tree::file(root.join("lib/hidden"), "", 0o644);
        }),
        Box::new(|root| {
            fs::remove_dir_all(root.join("lib")).unwrap();
            tree::directory(root.join("lib"), 0o700);
            tree::file(root.join("lib/not-hidden"), "", 0o644);
        }),
        Box::new(|root| tree::file(root.join("lib/newfile"), "", 0o644)),
    ]);
}

#[test]
fn owners_change_in_an_upper_layer() {
    check_layers(vec![
        Box::new(|root| {
            for path in ["opt", "opt/a", "opt/a/b"] {
                tree::directory(root.join(path), 0o700);
            }
            tree::file(root.join("opt/a/b/file.txt"), "hello", 0o644);
        }),
        Box::new(|root| {
            for path in ["opt", "opt/a", "opt/a/b", "opt/a/b/file.txt"] {
                chown(root.join(path), Some(1), Some(1)).unwrap();
            }
        }),
    ]);
}

#[test]
fn directory_permissions_survive_commit() {
    let own = |root: &Path, path: &str, id| chown(root.join(path), Some(id), Some(id)).unwrap();
    check_layers(vec![
        Box::new(move |root| {
            for n in 1..=5 {
                tree::directory(root.join(format!("dir{n}")), 0o700);
            }
            tree::file(root.join("dir4/f1"), "...", 0o644);
            tree::file(root.join("dir5/f1"), "...", 0o644);
            for path in ["dir1", "dir2", "dir3", "dir5", "dir5/f1"] {
                own(root, path, 1);
            }
        }),
        Box::new(move |root| {
            own(root, "dir2", 0);
            fs::remove_dir_all(root.join("dir3")).unwrap();
            own(root, "dir4", 1);
            own(root, "dir4/f1", 1);
        }),
        Box::new(move |root| {
            tree::directory(root.join("dir3"), 0o700);
            own(root, "dir3", 1);
            fs::remove_dir_all(root.join("dir5")).unwrap();
            tree::directory(root.join("dir5"), 0o700);
            own(root, "dir5", 1);
        }),
    ]);
}

#[test]
fn deleted_files_stay_deleted() {
    check_layers(vec![
        Box::new(|root| {
            tree::file(root.join("foo"), "foo\n", 0o777);
            tree::file(root.join("foobar"), "foobar\n", 0o777);
        }),
        Box::new(|root| fs::remove_file(root.join("foobar")).unwrap()),
        Box::new(|_| {}),
    ]);
}

#[test]
fn files_move_between_directories() {
    check_layers(vec![
        Box::new(|root| {
            tree::directory(root.join("dir1"), 0o700);
            tree::file(root.join("dir1/f1"), "Hello", 0o644);
            tree::directory(root.join("dir2"), 0o700);
            tree::file(root.join("dir2/f2"), "...", 0o644);
        }),
        Box::new(|root| {
            tree::directory(root.join("dir3"), 0o700);
            tree::file(root.join("dir3/f1"), "Hello", 0o644);
            fs::remove_dir_all(root.join("dir1")).unwrap();
            fs::hard_link(root.join("dir2/f2"), root.join("dir3/f2")).unwrap();
            fs::remove_file(root.join("dir2/f2")).unwrap();
        }),
    ]);
}

#[test]
fn files_are_renamed() {
    check_layers(vec![
        Box::new(|root| {
            tree::directory(root.join("somefiles"), 0o700);
            tree::file(root.join("somefiles/f1"), "was here first!", 0o644);
            tree::file(root.join("somefiles/f2"), "nothing interesting", 0o644);
        }),
        Box::new(|root| {
            let path = |name: &str| root.join("somefiles").join(name);
            tree::file(path("f1-overwrite"), "new content 1", 0o644);
            fs::rename(path("f1-overwrite"), path("f1")).unwrap();
            fs::rename(path("f2"), path("f3")).unwrap();
        }),
    ]);
}

#[test]
fn a_hundred_and_twenty_eight_layers() {
    let mut node = Node::start();
    let flat = node.new_directory();
    let bottom: Change = Box::new(|root| {
        tree::file(root.join("bottom"), "way at the bottom\n", 0o777);
        tree::file(root.join("overwriteme"), "FIRST!\n", 0o777);
        tree::directory(root.join("addhere"), 0o755);
        tree::directory(root.join("onlyme"), 0o755);
        tree::file(root.join("onlyme/bottom"), "bye!\n", 0o777);
    });
    let upper = (1..128).map(|n| -> Change {
        Box::new(move |root| {
            tree::file(root.join("overwriteme"), &format!("{n} WAS HERE!\n"), 0o777);
            tree::file(root.join(format!("addhere/file-{n}")), "same\n", 0o755);
            fs::remove_dir_all(root.join("onlyme")).unwrap();
            tree::directory(root.join("onlyme"), 0o755);
            tree::file(root.join(format!("onlyme/file-{n}")), "only me!\n", 0o777);
        })
    });
    let mut parent = String::new();
    for (n, change) in std::iter::once(bottom).chain(upper).enumerate() {
        let name = format!("committed-{n}");
        let before = tree::read(&flat);
        change(&flat);
        node.layer(&name, &parent, |root| {
            assert_eq!(tree::read(root), before, "{name}");
            change(root);
            assert_eq!(tree::read(root), tree::read(&flat), "{name}");
        });
        parent = name;
    }
    let mounts = node.view("view", &parent).unwrap();
    let target: PathBuf = node.new_directory();
    mount::with(&mounts, &target, |root| assert_eq!(tree::read(root), tree::read(&flat)));
    node.remove_all_and_check();
}
