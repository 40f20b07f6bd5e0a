//! Measures Prepare and Mounts of two snapshotters behind one containerd, in turns, and prints the
//! times and the paired differences in milliseconds as JSON, each as median, least and greatest.
//!
//! ```text
//! compare_snapshotters /run/containerd/containerd.sock coldsnap overlayfs 200 4
//!                      socket                          A        B         pairs layers
//! ```

use std::collections::HashMap;
use std::time::Instant;

use coldsnap_snapshotter::proto::v1::snapshots_client::SnapshotsClient;
use coldsnap_snapshotter::proto::v1::{
    CommitSnapshotRequest, MountsRequest, PrepareSnapshotRequest, RemoveSnapshotRequest,
};
use serde_json::json;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};

type Client = SnapshotsClient<Channel>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [socket, a, b, pairs, layers] = arguments.as_slice() else {
        return Err(
            "usage: compare_snapshotters <socket> <snapshotter A> <snapshotter B> <pairs> <layers>".into()
        );
    };
    let (pairs, layers): (usize, usize) = (pairs.parse()?, layers.parse()?);
    let channel = Endpoint::from_shared(format!("unix:{socket}"))?.connect().await?;
    let mut client = SnapshotsClient::new(channel);
    for snapshotter in [a, b] {
        build(&mut client, snapshotter, layers).await?;
    }
    let mut times = HashMap::<(&str, &str), Vec<f64>>::new();
    for n in 0..pairs {
        // The order changes each time, so that neither profits from the other's work.
        let order = if n % 2 == 0 { [a, b] } else { [b, a] };
        for snapshotter in order {
            for (call, milliseconds) in
                ["prepare", "mounts"].into_iter().zip(once(&mut client, snapshotter, layers).await?)
            {
                times.entry((snapshotter, call)).or_default().push(milliseconds);
            }
        }
    }
    for snapshotter in [a, b] {
        remove_all(&mut client, snapshotter, layers).await?;
    }
    let mut report = serde_json::Map::new();
    for call in ["prepare", "mounts"] {
        let of = |snapshotter: &str| times.get(&(snapshotter, call)).cloned().unwrap_or_default();
        let (mine, theirs) = (of(a), of(b));
        let differences = mine.iter().zip(&theirs).map(|(x, y)| x - y).collect();
        let summary = json!({a: median(mine), b: median(theirs), "paired_difference": median(differences)});
        report.insert(format!("{call}_ms"), summary);
    }
    report.insert("pairs".to_owned(), json!(pairs));
    report.insert("layers".to_owned(), json!(layers));
    println!("{:#}", serde_json::Value::from(report));
    Ok(())
}

/// Median, least and greatest.
fn median(mut values: Vec<f64>) -> serde_json::Value {
    values.sort_by(f64::total_cmp);
    let round = |value: Option<&f64>| value.map(|v| (v * 1000.0).round() / 1000.0);
    json!([round(values.get(values.len() / 2)), round(values.first()), round(values.last())])
}

fn request<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("containerd-namespace", MetadataValue::from_static("compare"));
    request
}

fn root_label() -> HashMap<String, String> {
    HashMap::from([("containerd.io/gc.root".to_owned(), "compare".to_owned())])
}

fn layer(n: usize) -> String {
    if n == 0 { String::new() } else { format!("compare-layer-{n}") }
}

async fn build(client: &mut Client, snapshotter: &str, layers: usize) -> Result<(), Status> {
    for n in 1..=layers {
        prepare(client, snapshotter, "compare-building", &layer(n - 1)).await?;
        let commit = CommitSnapshotRequest {
            snapshotter: snapshotter.to_owned(),
            name: layer(n),
            key: "compare-building".to_owned(),
            labels: root_label(),
            parent: String::new(),
        };
        client.commit(request(commit)).await?;
    }
    Ok(())
}

async fn prepare(client: &mut Client, snapshotter: &str, key: &str, parent: &str) -> Result<(), Status> {
    let prepare = PrepareSnapshotRequest {
        snapshotter: snapshotter.to_owned(),
        key: key.to_owned(),
        parent: parent.to_owned(),
        labels: root_label(),
    };
    client.prepare(request(prepare)).await.map(|_| ())
}

async fn remove(client: &mut Client, snapshotter: &str, key: &str) -> Result<(), Status> {
    let remove = RemoveSnapshotRequest { snapshotter: snapshotter.to_owned(), key: key.to_owned() };
    client.remove(request(remove)).await.map(|_| ())
}

async fn once(client: &mut Client, snapshotter: &str, layers: usize) -> Result<[f64; 2], Status> {
    let key = "compare-active";
    let milliseconds = |start: Instant| start.elapsed().as_secs_f64() * 1000.0;
    let start = Instant::now();
    prepare(client, snapshotter, key, &layer(layers)).await?;
    let prepared = milliseconds(start);
    let start = Instant::now();
    let mounts = MountsRequest { snapshotter: snapshotter.to_owned(), key: key.to_owned() };
    client.mounts(request(mounts)).await?;
    let mounted = milliseconds(start);
    remove(client, snapshotter, key).await?;
    Ok([prepared, mounted])
}

async fn remove_all(client: &mut Client, snapshotter: &str, layers: usize) -> Result<(), Status> {
    for n in (1..=layers).rev() {
        remove(client, snapshotter, &layer(n)).await?;
    }
    Ok(())
}
