//! The Unix socket that containerd connects to.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use coldsnap::durable;

use crate::error::Error;

/// A listening socket and the name by which it is found.
#[derive(Debug)]
pub struct Socket {
    path: PathBuf,
}

impl Socket {
    /// Listens at `path`, creating its directory. A socket that nobody listens on is replaced.
    ///
    /// # Errors
    /// When somebody listens there, when something else than a socket is there, or when the system refuses.
    pub fn listen(path: &Path) -> Result<(UnixListener, Self), Error> {
        let directory = durable::parent(path);
        fs::create_dir_all(directory).map_err(Error::io("create directory", directory))?;
        remove_stale(path)?;
        let listener = UnixListener::bind(path).map_err(Error::io("listen on", path))?;
        // Whoever may connect commands mounts that containerd makes as root.
        fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(Error::io("chmod", path))?;
        listener.set_nonblocking(true).map_err(Error::io("listen on", path))?;
        Ok((listener, Self { path: path.to_owned() }))
    }

    /// Removes the name once its listener is gone, unless another process listens there by now.
    pub fn remove(self) {
        if let Err(error) = remove_stale(&self.path) {
            tracing::debug!(%error, "leaving the socket");
        }
    }
}

fn remove_stale(path: &Path) -> Result<(), Error> {
    let found = match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        result => result.map_err(Error::io("stat", path))?,
    };
    let refuse =
        |what: &str| Err(Error::FailedPrecondition(format!("cannot listen on {}: {what}", path.display())));
    if !found.file_type().is_socket() {
        return refuse("there is something that is not a socket");
    }
    match UnixStream::connect(path) {
        Ok(_) => refuse("another process listens there"),
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(Error::io("remove the stale socket", path))
        }
        Err(e) => Err(Error::io("find out whether somebody listens on", path)(e)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_live_socket_is_left_alone_and_a_stale_one_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/s.sock");
        let (listener, socket) = Socket::listen(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let error = Socket::listen(&path).unwrap_err().to_string();
        assert!(error.contains("another process"), "{error}");
        assert!(UnixStream::connect(&path).is_ok());

        drop(listener);
        let (listener, replacing) = Socket::listen(&path).unwrap();
        socket.remove();
        assert!(UnixStream::connect(&path).is_ok(), "the first one removed the second one's name");
        drop(listener);
        replacing.remove();
        assert!(!path.exists());
    }

    #[test]
    fn other_files_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.sock");
        fs::write(&path, "data").unwrap();
        assert!(Socket::listen(&path).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"data");
    }
}
