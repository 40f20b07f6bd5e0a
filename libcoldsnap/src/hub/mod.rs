//! The HTTP protocol of the Hugging Face hub, as far as payloads need it: what sources and publication share.
//!
//! Redirects are followed by hand, because the hub tells on its own answer what the content network delivers, and
//! because the access token must not leave the hub.

#[cfg(feature = "sources")]
pub mod http;
mod place;
mod token;

#[cfg(feature = "sources")]
pub(crate) use place::is_commit;
pub use place::{Endpoint, PUBLIC_ENDPOINT, Place, PlaceError, Repository};
pub use token::{Token, TokenError};
