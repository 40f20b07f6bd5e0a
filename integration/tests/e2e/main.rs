//! End-to-end stories.
