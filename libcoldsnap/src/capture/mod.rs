//! Capture: which memory is the model's, and what becomes of the rest.
//!
//! `checkpoint` reads where the tensors of the reference files lie, `content_match` finds their
//! bytes in the dumped memory. Neither needs the engine's help.

pub mod checkpoint;
pub mod content_match;
pub mod mapped_file;
