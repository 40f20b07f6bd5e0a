//! CRIU images: codec, the remapper that turns anonymous memory into file mappings, its proof,
//! CRIU's logs and per-container configuration.

pub mod areas;
pub mod config;
pub mod image;
pub mod log;
pub mod process;
pub mod prove;
pub mod remap;
pub mod runs;

/// Messages of CRIU images, generated from `proto/criu.proto`.
// Generated code is not ours to mend; its `unwrap`s are in accessors that create what they unwrap.
#[allow(missing_docs, missing_debug_implementations, clippy::all, clippy::pedantic, clippy::restriction)]
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/proto/mod.rs"));
    pub use criu::*;
}

/// Bits of `VmaEntry.status` (source: CRIU `criu/include/image.h`).
pub mod vma_status {
    /// The area is a stack.
    pub const AREA_STACK: u32 = 1 << 1;
    /// The kernel's vsyscall page.
    pub const AREA_VSYSCALL: u32 = 1 << 2;
    /// The vdso.
    pub const AREA_VDSO: u32 = 1 << 3;
    /// A private mapping of a file.
    pub const FILE_PRIVATE: u32 = 1 << 6;
    /// Private anonymous memory.
    pub const ANON_PRIVATE: u32 = 1 << 9;
    /// System V shared memory.
    pub const AREA_SYSVIPC: u32 = 1 << 10;
    /// Memory of a socket.
    pub const AREA_SOCKET: u32 = 1 << 11;
    /// The vvar pages.
    pub const AREA_VVAR: u32 = 1 << 12;
    /// An AIO ring.
    pub const AREA_AIORING: u32 = 1 << 13;
    /// A memfd.
    pub const AREA_MEMFD: u32 = 1 << 14;
    /// A shadow stack.
    pub const AREA_SHSTK: u32 = 1 << 15;
    /// Not a kernel area: a range with guard pages installed by MADV_GUARD_INSTALL.
    pub const AREA_GUARD: u32 = 1 << 16;
    /// Handled by a CRIU plugin.
    pub const EXT_PLUGIN: u32 = 1 << 27;
}

/// Flags of `PagemapEntry` (source: CRIU `criu/include/pagemap.h`).
pub mod pagemap_flags {
    /// The pages are in the parent image of an incremental dump.
    pub const PARENT: u32 = 1 << 0;
    /// The pages may be restored lazily.
    pub const LAZY: u32 = 1 << 1;
    /// The pages are in the pages image.
    pub const PRESENT: u32 = 1 << 2;
}

/// MAP_ANONYMOUS and MAP_HUGETLB of `VmaEntry.flags`.
pub mod map_flags {
    /// MAP_ANONYMOUS on the supported architectures.
    pub const ANONYMOUS: u32 = 0x20;
    /// MAP_GROWSDOWN.
    pub const GROWSDOWN: u32 = 0x0100;
    /// MAP_HUGETLB.
    pub const HUGETLB: u32 = 0x4_0000;
}
