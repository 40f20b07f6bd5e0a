//! Generates the snapshots service from the interface definition in `proto/`, without protoc.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    let definition = protox::compile(["containerd/services/snapshots/v1/snapshots.proto"], ["proto"])?;
    // The client half serves the integration tests.
    tonic_prost_build::configure().compile_fds(definition)?;
    Ok(())
}
