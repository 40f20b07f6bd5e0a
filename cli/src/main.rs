//! x
mod containerd;
fn main() {}
