//! Standard streams of a process: which ones containerd wants, the descriptors the process gets, and the copying
//! between them.
//!
//! A process gets pipes that the shim made, never containerd's fifos or log files themselves: CRIU can dump a
//! pipe, the runtime knows how to replace one at restore, and a client that goes away is the shim's matter only.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use containerd_shim::asynchronous::io::{IoTasks, Pty};
use log::warn;
use rustix::fs::{Gid, Uid, fchown};
use rustix::pipe::{PipeFlags, pipe_with};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::task::JoinHandle;

use crate::runc::ChildStdio;

/// How long output that a process left behind may take to reach its log file after the process was deleted.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// One read of a process's output on its way into a log file.
const COPY_BUFFER: usize = 16 << 10;

/// The standard streams could not be set up.
#[derive(Debug, Error)]
pub enum StdioError {
    /// The URI names a logger that this shim cannot drive.
    #[error("stdio {uri:?}: a {scheme} logger is not implemented by this shim; use a fifo or file:// URI")]
    Unimplemented {
        /// The URI of the request.
        uri: String,
        /// Its scheme.
        scheme: String,
    },
    /// The URI makes no sense.
    #[error("stdio {uri:?}: unknown scheme {scheme:?}; a fifo's path or a file:// URI is expected")]
    UnknownScheme {
        /// The URI of the request.
        uri: String,
        /// Its scheme.
        scheme: String,
    },
    /// A pipe, fifo or file could not be used.
    #[error("cannot {act}: {source}")]
    Io {
        /// What was being done, and to what.
        act: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// The shim library could not connect a stream.
    #[error(transparent)]
    Copy(#[from] containerd_shim::Error),
}

fn io_error(act: impl Into<String>) -> impl FnOnce(io::Error) -> StdioError {
    let act = act.into();
    |source| StdioError::Io { act, source }
}

/// The streams as containerd names them: fifos, URIs, or empty for none.
#[derive(Clone, Debug, Default)]
pub struct StdioRequest {
    /// Fifo of the input.
    pub stdin: String,
    /// Fifo or URI of the output.
    pub stdout: String,
    /// Fifo of the error output; with a URI in `stdout` that one is used for both.
    pub stderr: String,
    /// The process gets a terminal.
    pub terminal: bool,
}

/// Where one output stream goes.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Target {
    Discard,
    Fifo(String),
    File(PathBuf),
}

impl StdioRequest {
    fn output_targets(&self) -> Result<(Target, Target), StdioError> {
        match target(&self.stdout)? {
            // As with containerd's own shim: a log URI takes both streams.
            Target::File(path) if self.stdout.contains("://") => {
                let stderr = if self.terminal { Target::Discard } else { Target::File(path.clone()) };
                Ok((Target::File(path), stderr))
            }
            stdout => Ok((stdout, target(&self.stderr)?)),
        }
    }
}

fn target(uri: &str) -> Result<Target, StdioError> {
    if uri.is_empty() {
        return Ok(Target::Discard);
    }
    let (scheme, rest) = uri.split_once("://").unwrap_or(("", uri));
    match scheme {
        "" | "fifo" => {
            let is_fifo = std::fs::metadata(rest).map(|meta| meta.file_type().is_fifo());
            Ok(match is_fifo.map_err(io_error(format!("look at the output {rest}")))? {
                true => Target::Fifo(rest.to_owned()),
                false => Target::File(rest.into()),
            })
        }
        "file" => {
            let path = rest.split(['?', '#']).next().unwrap_or_default();
            Ok(Target::File(percent_decoded(path).into()))
        }
        "binary" | "binary-v2" => {
            Err(StdioError::Unimplemented { uri: uri.to_owned(), scheme: scheme.to_owned() })
        }
        _ => Err(StdioError::UnknownScheme { uri: uri.to_owned(), scheme: scheme.to_owned() }),
    }
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let escaped = (first == b'%')
            .then(|| tail.get(..2).and_then(|hex| std::str::from_utf8(hex).ok()))
            .flatten()
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match escaped {
            Some(byte) => {
                bytes.push(byte);
                rest = tail.get(2..).unwrap_or_default();
            }
            None => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The shim's ends of the pipes of one process.
#[derive(Debug, Default)]
pub struct ShimEnds {
    stdin: Option<OwnedFd>,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
}

/// Makes the pipes of a process without a terminal; a stream that nobody wants is `/dev/null`.
/// `owner` is the user and group of the pipes (a process that is not root may reopen `/dev/stdout`).
///
/// # Errors
/// No pipe could be made, or a URI cannot be used.
pub fn make_pipes(request: &StdioRequest, owner: (u32, u32)) -> Result<(ChildStdio, ShimEnds), StdioError> {
    let (stdout, stderr) = request.output_targets()?;
    let mut child = ChildStdio::default();
    let mut ends = ShimEnds::default();
    if !request.stdin.is_empty() {
        let (read, write) = new_pipe(owner)?;
        (child.stdin, ends.stdin) = (Some(read), Some(write));
    }
    if stdout != Target::Discard {
        let (read, write) = new_pipe(owner)?;
        (child.stdout, ends.stdout) = (Some(write), Some(read));
    }
    if stderr != Target::Discard {
        let (read, write) = new_pipe(owner)?;
        (child.stderr, ends.stderr) = (Some(write), Some(read));
    }
    Ok((child, ends))
}

fn new_pipe((uid, gid): (u32, u32)) -> Result<(OwnedFd, OwnedFd), StdioError> {
    let (read, write) =
        pipe_with(PipeFlags::CLOEXEC).map_err(|error| io_error("make a pipe")(error.into()))?;
    if (uid, gid) != (0, 0) {
        for end in [&read, &write] {
            fchown(end, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
                .map_err(|error| io_error(format!("give a pipe to {uid}:{gid}"))(error.into()))?;
        }
    }
    Ok((read, write))
}

/// The running copies of one process's streams.
#[derive(Default)]
pub struct Copies {
    fifos: IoTasks,
    files: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Copies {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Copies").field("files", &self.files.len()).finish_non_exhaustive()
    }
}

impl Copies {
    /// Connects the pipes of [`make_pipes`] with what the request names.
    ///
    /// # Errors
    /// A fifo or file cannot be opened.
    pub fn start_pipes(&mut self, request: &StdioRequest, ends: ShimEnds) -> Result<(), StdioError> {
        let (stdout, stderr) = request.output_targets()?;
        if let Some(end) = ends.stdin {
            let sender = pipe::Sender::from_owned_fd(end).map_err(io_error("use the input pipe"))?;
            self.fifos.copy_from_fifo(&request.stdin, sender)?;
        }
        for (end, target) in [(ends.stdout, stdout), (ends.stderr, stderr)] {
            if let Some(end) = end {
                let receiver = pipe::Receiver::from_owned_fd(end).map_err(io_error("use an output pipe"))?;
                self.copy_output(receiver, &target)?;
            }
        }
        Ok(())
    }

    /// Connects a terminal's master side with what the request names.
    ///
    /// # Errors
    /// A fifo or file cannot be opened.
    pub fn start_console(&mut self, request: &StdioRequest, console: &Pty) -> Result<(), StdioError> {
        let (stdout, _) = request.output_targets()?;
        if !request.stdin.is_empty() {
            self.fifos.copy_from_fifo(&request.stdin, console.clone())?;
        }
        self.copy_output(console.clone(), &stdout)
    }

    /// Lets the process see the end of its input once the client has gone.
    pub fn close_stdin(&self) {
        self.fifos.close_input();
    }

    /// Ends all copies; output that is still on its way gets some time.
    pub async fn shutdown(&mut self) {
        self.fifos.shutdown().await;
        for mut file in self.files.drain(..) {
            if tokio::time::timeout(DRAIN_TIMEOUT, &mut file).await.is_err() {
                warn!("output copy did not finish within {DRAIN_TIMEOUT:?}, cancelling it");
                file.abort();
            }
        }
    }

    /// Ends all copies at once: the process did not start.
    pub async fn abort(&mut self) {
        self.fifos.abort().await;
        self.files.drain(..).for_each(|file| file.abort());
    }

    /// Ends all copies of a start that failed; the next start begins with a fresh set, which remembers a
    /// [`Copies::close_stdin`] that has come already.
    pub async fn renew(&mut self) {
        let fifos = self.fifos.renew();
        self.abort().await;
        self.fifos = fifos;
    }

    fn copy_output<R>(&mut self, from: R, target: &Target) -> Result<(), StdioError>
    where
        R: AsyncRead + Send + Unpin + 'static,
    {
        match target {
            // A terminal without a client must still be emptied, or its process stops at a full buffer.
            Target::Discard => self.files.push(tokio::spawn(copy_chunks(from, None))),
            Target::Fifo(path) => self.fifos.copy_to_fifo(from, path)?,
            Target::File(path) => {
                self.files.push(tokio::spawn(copy_chunks(from, Some(LogFile::open(path)?))))
            }
        }
        Ok(())
    }
}

/// Empties `from`, into `log` if there is one.
async fn copy_chunks(mut from: impl AsyncRead + Unpin, mut log: Option<LogFile>) {
    let mut buffer = vec![0; COPY_BUFFER];
    loop {
        match from.read(&mut buffer).await {
            Ok(0) => return,
            Ok(count) => {
                if let Some(log) = &mut log {
                    log.write(buffer.get(..count).unwrap_or_default()).await;
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // A terminal that hangs up (EIO) is how a copy normally ends.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => return,
            Err(error) => {
                warn!("cannot read a process's output: {error}");
                return;
            }
        }
    }
}

#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    file: tokio::fs::File,
    failed: bool,
}

impl LogFile {
    fn open(path: &Path) -> Result<Self, StdioError> {
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)
                .map_err(io_error(format!("make the log directory {}", parent.display())))?;
        }
        let file = OpenOptions::new().append(true).create(true).open(path);
        let file = file.map_err(io_error(format!("open the log file {}", path.display())))?;
        Ok(Self { path: path.to_owned(), file: tokio::fs::File::from_std(file), failed: false })
    }

    /// After a failed write (a full disk) the process must not block: its output is lost, and that is said once.
    async fn write(&mut self, chunk: &[u8]) {
        if self.failed {
            return;
        }
        let result = match self.file.write_all(chunk).await {
            Ok(()) => self.file.flush().await,
            error => error,
        };
        if let Err(error) = result {
            warn!("cannot write log {}: {error}; further output is lost", self.path.display());
            self.failed = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn request(stdout: &str, stderr: &str) -> StdioRequest {
        StdioRequest { stdout: stdout.to_owned(), stderr: stderr.to_owned(), ..Default::default() }
    }

    #[test]
    fn uris_name_their_targets() {
        let dir = tempfile::tempdir().unwrap();
        let plain = dir.path().join("plain");
        std::fs::write(&plain, b"").unwrap();
        let plain = plain.to_str().unwrap();

        assert_eq!(request("", "").output_targets().unwrap(), (Target::Discard, Target::Discard));
        assert_eq!(
            request("file:///var/log/a%20b.log?x=1", "").output_targets().unwrap(),
            (Target::File("/var/log/a b.log".into()), Target::File("/var/log/a b.log".into()))
        );
        assert_eq!(
            request(plain, "").output_targets().unwrap(),
            (Target::File(plain.into()), Target::Discard)
        );
        assert!(matches!(request("binary:///x", "").output_targets(), Err(StdioError::Unimplemented { .. })));
        assert!(matches!(request("npipe:///x", "").output_targets(), Err(StdioError::UnknownScheme { .. })));
        assert!(matches!(request("/nonexistent/fifo", "").output_targets(), Err(StdioError::Io { .. })));
    }

    #[test]
    fn percent_signs_that_escape_nothing_stay() {
        assert_eq!(percent_decoded("a%2Fb%zz%4"), "a/b%zz%4");
    }

    #[tokio::test]
    async fn a_log_file_gets_both_streams_appended() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("logs/out.log");
        std::fs::create_dir(path.parent().unwrap()).unwrap();
        std::fs::write(&path, b"before\n").unwrap();
        let request = request(&format!("file://{}", path.display()), "");

        let (child, ends) = make_pipes(&request, (0, 0)).unwrap();
        let mut copies = Copies::default();
        copies.start_pipes(&request, ends).unwrap();
        std::fs::File::from(child.stdout.unwrap()).write_all(b"out\n").unwrap();
        std::fs::File::from(child.stderr.unwrap()).write_all(b"err\n").unwrap();
        copies.shutdown().await;
        let mut lines: Vec<_> = std::fs::read_to_string(&path).unwrap().lines().map(str::to_owned).collect();
        lines.sort();
        assert_eq!(lines, ["before", "err", "out"]);
    }
}
