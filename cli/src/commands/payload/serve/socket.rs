//! A Unix socket that only its owner can reach.

use std::fs::{DirBuilder, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use coldsnap::durable;
use rustix::fs::Mode;

use crate::output::CliError;

/// The name of a listening socket; removed when dropped, unless it names another one by then.
#[derive(Debug)]
pub struct Socket {
    path: PathBuf,
    id: (u64, u64),
}

impl Socket {
    /// Listens at `path`, mode 0600, in a directory that only its owner may write. A missing directory is made; a
    /// socket that nobody listens on is replaced.
    ///
    /// # Errors
    /// When others may write the directory, when somebody listens there, when something else than a socket is
    /// there, or when the system refuses.
    pub fn listen(path: &Path) -> Result<(UnixListener, Self), CliError> {
        let fail =
            |what: String| CliError::new("Socket", format!("cannot listen on {}: {what}", path.display()));
        let directory = durable::parent(path);
        check_directory(directory)
            .map_err(|what| fail(format!("the directory {} {what}", directory.display())))?;
        remove_stale(path).map_err(fail)?;
        // From its first moment: a chmod afterwards would come too late.
        let before = rustix::process::umask(Mode::from_raw_mode(0o177));
        let bound = UnixListener::bind(path);
        rustix::process::umask(before);
        let listener = bound.map_err(|e| fail(e.to_string()))?;
        let metadata = std::fs::symlink_metadata(path).map_err(|e| fail(e.to_string()))?;
        let socket = Self { path: path.to_owned(), id: id(&metadata) };
        listener.set_nonblocking(true).map_err(|e| fail(e.to_string()))?;
        Ok((listener, socket))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if std::fs::symlink_metadata(&self.path).is_ok_and(|metadata| id(&metadata) == self.id)
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the socket");
        }
    }
}

fn id(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

/// Who may write the directory could put another socket in the place of this one.
fn check_directory(directory: &Path) -> Result<(), String> {
    let make = DirBuilder::new().recursive(true).mode(0o700).create(directory);
    make.map_err(|e| format!("cannot be made: {e}"))?;
    let metadata = std::fs::metadata(directory).map_err(|e| format!("cannot be inspected: {e}"))?;
    if metadata.mode() & 0o022 != 0 {
        return Err(format!(
            "has mode {:o}: expected no write permission for group and others",
            metadata.mode() & 0o7777
        ));
    }
    let user = rustix::process::geteuid().as_raw();
    if ![0, user].contains(&metadata.uid()) {
        return Err(format!("belongs to user {}: expected {user} or root", metadata.uid()));
    }
    Ok(())
}

fn remove_stale(path: &Path) -> Result<(), String> {
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e.to_string()),
        Ok(found) if !found.file_type().is_socket() => {
            return Err("something that is not a socket is there".to_owned());
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Ok(_) => Err("another process listens there".to_owned()),
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path).map_err(|e| format!("the stale socket cannot be removed: {e}"))
        }
        Err(e) => Err(format!("cannot find out whether somebody listens there: {e}")),
    }
}
