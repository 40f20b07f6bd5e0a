//! One module per command, each with its arguments and a `run`.

pub mod capabilities;
pub mod capture;
pub mod check;
pub mod config;
pub mod doctor;
pub mod inspect;
pub mod materialize;
pub mod overlay;
pub mod payload;
pub mod publish_native;
pub mod rm;
pub mod verify;
