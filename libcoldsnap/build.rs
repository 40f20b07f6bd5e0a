//! Generates the CRIU image messages; a pure Rust parser, no protoc.

fn main() {
    println!("cargo:rerun-if-changed=proto/criu.proto");
    protobuf_codegen::Codegen::new()
        .pure()
        .include("proto")
        .input("proto/criu.proto")
        .cargo_out_dir("proto")
        .run_from_script();
}
