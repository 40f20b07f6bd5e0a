//! Messages, server and client generated from `proto/`; the module tree mirrors the packages, because
//! generated code refers to other packages through `super`.

#![allow(missing_docs, missing_debug_implementations, clippy::all)]

/// Package `containerd`.
pub mod containerd {
    /// Package `containerd.types`.
    pub mod types {
        tonic::include_proto!("containerd.types");
    }
    /// Package `containerd.services`.
    pub mod services {
        /// Package `containerd.services.snapshots`.
        pub mod snapshots {
            /// Package `containerd.services.snapshots.v1`.
            pub mod v1 {
                tonic::include_proto!("containerd.services.snapshots.v1");
            }
        }
    }
}

pub use containerd::services::snapshots::v1;
pub use containerd::types::Mount;
