//! Points at which a test lets the process die as if by kill -9. Nothing in a release build.

/// Kills this process when the environment variable `COLDSNAP_SNAPSHOTTER_FAULT` is `name`.
#[cfg(debug_assertions)]
pub fn point(name: &str) {
    if std::env::var_os("COLDSNAP_SNAPSHOTTER_FAULT").is_some_and(|wanted| wanted == name) {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

/// Nothing: this is a release build.
#[cfg(not(debug_assertions))]
pub const fn point(_name: &str) {}
