//! `coldsnap payload serve`: the verifier for managers that run elsewhere, over HTTP on a private Unix socket.

mod api;
mod socket;
mod token;
mod verifications;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use coldsnap::store::NodeStore;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use serde::Serialize;
use tokio::net::{UnixListener, UnixStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use self::api::Api;
use self::socket::Socket;
use self::token::Token;
use crate::output::{CliError, Output};

/// More clients than this wait to be accepted.
const MAX_CONNECTIONS: usize = 64;
/// A client must send the head of its next request within this time, or is disconnected.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Heads are far smaller.
const MAX_HEAD_BYTES: usize = 16 << 10;
/// How long requests that are being answered may go on after a signal.
const GRACE: Duration = Duration::from_secs(10);
/// How long to wait after a failed accept (too many open files).
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Verify payloads for a manager that runs elsewhere: HTTP on a private Unix socket.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Socket to listen on.
    #[arg(long, value_name = "PATH", default_value = "/run/coldsnap/payloads.sock")]
    socket: PathBuf,
    /// File with the token that clients send; made with a random token when there is none.
    #[arg(long, value_name = "FILE")]
    token_file: PathBuf,
}

/// Printed when requests are answered.
#[derive(Serialize)]
struct Ready<'a> {
    socket: &'a PathBuf,
    token_file: &'a PathBuf,
    store: String,
    api: &'static str,
}

/// Runs the command until SIGTERM or SIGINT.
///
/// # Errors
/// When the token file or the socket cannot be used.
pub fn run(args: &Args, store: NodeStore, output: &Output) -> Result<(), CliError> {
    let token = Token::load_or_create(&args.token_file)?;
    let (listener, socket) = Socket::listen(&args.socket)?;
    let ready = Ready {
        socket: &args.socket,
        token_file: &args.token_file,
        store: store.root().display().to_string(),
        api: api::VERSION,
    };
    let io = |e| CliError::new("Io", format!("cannot start the server: {e}"));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(io)?;
    let served = runtime.block_on(async {
        let stop = [SignalKind::terminate(), SignalKind::interrupt()].map(signal);
        let listener = UnixListener::from_std(listener).map_err(io)?;
        let [Ok(terminate), Ok(interrupt)] = stop else {
            return Err(CliError::new("Io", "cannot wait for signals"));
        };
        output.result(&ready, || {
            format!("listening on {} for the store {}", args.socket.display(), ready.store)
        })?;
        serve(listener, socket, Arc::new(Api::new(store, token)), [terminate, interrupt]).await;
        Ok(())
    });
    // A verification that nobody waits for any more ends with the process.
    runtime.shutdown_background();
    served
}

async fn serve(
    listener: UnixListener,
    socket: Socket,
    api: Arc<Api>,
    [mut terminate, mut interrupt]: [Signal; 2],
) {
    let graceful = GracefulShutdown::new();
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        tokio::select! {
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            accepted = accept(&listener, &permits) => match accepted {
                Ok((stream, permit)) => {
                    tokio::spawn(connection(stream, Arc::clone(&api), graceful.watcher(), permit));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_RETRY).await;
                }
            },
        }
    }
    // New clients must find nobody, or whoever listens next.
    drop(socket);
    drop(listener);
    if tokio::time::timeout(GRACE, graceful.shutdown()).await.is_err() {
        tracing::warn!("stopping although requests are still waiting for an answer");
    }
}

async fn accept(
    listener: &UnixListener,
    permits: &Arc<Semaphore>,
) -> std::io::Result<(UnixStream, OwnedSemaphorePermit)> {
    let permit = Arc::clone(permits).acquire_owned().await.map_err(std::io::Error::other)?;
    let (stream, _) = listener.accept().await?;
    Ok((stream, permit))
}

async fn connection(stream: UnixStream, api: Arc<Api>, watcher: Watcher, _permit: OwnedSemaphorePermit) {
    let service = service_fn(move |request| Arc::clone(&api).answer(request));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).max_buf_size(MAX_HEAD_BYTES);
    if let Err(error) = watcher.watch(http.serve_connection(TokioIo::new(stream), service)).await {
        tracing::debug!(%error, "a connection ended early");
    }
}
