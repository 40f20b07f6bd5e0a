//! Capture: which memory is the model's, and what becomes of the rest.
//!
//! `checkpoint` reads where the tensors of the reference files lie, `content_match` finds their bytes in the
//! dumped memory (neither needs the engine's help), `plan` decides what goes where, `run` does it.

pub mod checkpoint;
pub mod content_match;
mod descriptor;
mod earlier;
pub mod facts;
pub mod layer;
pub mod plan;
pub mod preflight;
pub mod progress;
pub mod run;
pub mod scope;
pub mod source;
mod worker;
