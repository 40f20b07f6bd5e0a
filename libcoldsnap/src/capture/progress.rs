//! How long work tells how far it is.

/// Receives the progress of long work.
pub trait Progress {
    /// A phase begins; it will process `total` bytes.
    fn begin(&mut self, phase: &'static str, total: u64);
    /// So many more bytes of the current phase are done.
    fn advance(&mut self, bytes: u64);
}

/// Tells nobody.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {
    fn begin(&mut self, _: &'static str, _: u64) {}
    fn advance(&mut self, _: u64) {}
}
