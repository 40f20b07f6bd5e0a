//! The socket through which the OCI runtime hands over the master side of a terminal.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use containerd_shim::asynchronous::io::Pty;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::termios::{Winsize, tcsetwinsize};
use tokio::io::Interest;
use tokio::net::UnixListener;

use crate::error::TaskError;

/// The runtime connects before it ends, so this is reached only when something is broken.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// A listening socket in the bundle.
#[derive(Debug)]
pub struct ConsoleSocket {
    listener: UnixListener,
    file: PathBuf,
    short: PathBuf,
    _directory: File,
}

impl ConsoleSocket {
    /// Listens at `<bundle>/<name>`.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn listen(bundle: &Path, name: &str) -> Result<Self, TaskError> {
        let act = || format!("listen for a terminal at {}", bundle.join(name).display());
        let directory = File::open(bundle).map_err(TaskError::io(act()))?;
        // A socket's address holds 107 bytes, which bundle paths exceed: name it through the open directory.
        let short =
            PathBuf::from(format!("/proc/{}/fd/{}/{name}", std::process::id(), directory.as_raw_fd()));
        let file = bundle.join(name);
        match std::fs::remove_file(&file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(TaskError::io(act())(error)),
            _ => {}
        }
        let listener = UnixListener::bind(&short).map_err(TaskError::io(act()))?;
        Ok(Self { listener, file, short, _directory: directory })
    }

    /// The path to give to the runtime.
    pub fn path(&self) -> &Path {
        &self.short
    }

    /// Takes the terminal that the runtime sent.
    ///
    /// # Errors
    /// Nothing came, or something else than one descriptor.
    pub async fn receive(self) -> Result<Pty, TaskError> {
        let received = tokio::time::timeout(RECEIVE_TIMEOUT, self.receive_descriptor()).await;
        let descriptor = received
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .map_err(TaskError::io(format!("receive the terminal at {}", self.file.display())))?;
        Ok(Pty::new(File::from(descriptor)).map_err(crate::stdio::StdioError::from)?)
    }

    async fn receive_descriptor(&self) -> io::Result<OwnedFd> {
        let (stream, _) = self.listener.accept().await?;
        loop {
            stream.readable().await?;
            match stream.try_io(Interest::READABLE, || receive_from(&stream)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result,
            }
        }
    }
}

impl Drop for ConsoleSocket {
    fn drop(&mut self) {
        // Gone with the bundle otherwise.
        let _ = std::fs::remove_file(&self.file);
    }
}

fn receive_from(stream: &tokio::net::UnixStream) -> io::Result<OwnedFd> {
    // The payload is the terminal's name; only the descriptor is of use.
    let mut name = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(stream, &mut [IoSliceMut::new(&mut name)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let descriptors = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    let first = descriptors.flatten().next();
    first.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the message held no descriptor"))
}

/// Sets the size of a terminal in characters.
///
/// # Errors
/// A size over 65535, or the kernel's own error.
pub fn resize(console: &Pty, width: u32, height: u32) -> Result<(), TaskError> {
    let (Ok(columns), Ok(rows)) = (u16::try_from(width), u16::try_from(height)) else {
        return Err(TaskError::InvalidArgument(format!(
            "a terminal of {width}x{height} characters is too large"
        )));
    };
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(console, size).map_err(|errno| TaskError::io("resize the terminal")(errno.into()))
}
