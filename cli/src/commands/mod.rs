//! One module per command, each with its arguments and a `run`.

pub mod check;
pub mod payload;
pub mod verify;
