//! `coldsnap-snapshotter`: serves the snapshotter on a Unix socket until it is told to stop.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use coldsnap::config::Config;
use coldsnap_snapshotter::error::Error;
use coldsnap_snapshotter::notify::notify;
use coldsnap_snapshotter::proto::v1::snapshots_server::SnapshotsServer;
use coldsnap_snapshotter::service::Service;
use coldsnap_snapshotter::snapshotter::Snapshotter;
use coldsnap_snapshotter::socket::Socket;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tracing_subscriber::EnvFilter;

/// How long a stop waits for calls in progress and for clients to hang up. What is cut off then is repaired at
/// the next start, as after a crash.
const STOP_GRACE: Duration = Duration::from_secs(3);

/// containerd proxy snapshotter that leases and surfaces the model payloads of capsules.
///
/// Log level: environment variable COLDSNAP_LOG (error, warn, info, debug, trace).
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    /// Unix socket to serve on.
    #[arg(long, value_name = "SOCKET", default_value = "/run/coldsnap/snapshotter.sock")]
    address: PathBuf,
    /// Directory of snapshots and their metadata.
    #[arg(long, value_name = "DIRECTORY", default_value = "/var/lib/coldsnap/snapshotter")]
    root: PathBuf,
    /// Node store of model payloads; default: that of the configuration.
    #[arg(long, value_name = "DIRECTORY", env = "COLDSNAP_STORE")]
    store: Option<PathBuf>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    log_to_standard_error();
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(%error, "the snapshotter ends");
            ExitCode::FAILURE
        }
    }
}

fn log_to_standard_error() {
    let filter = EnvFilter::try_from_env("COLDSNAP_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let logger = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if std::io::stderr().is_terminal() {
        logger.init();
    } else {
        logger.json().flatten_event(true).init();
    }
}

fn run(options: &Options) -> Result<(), Error> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // They only translate messages; the work is done on blocking threads.
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|source| Error::Io { doing: "start threads".to_owned(), source })?;
    let store = match &options.store {
        Some(store) => store.clone(),
        None => Config::of_node()?.store.root,
    };
    let snapshotter = Arc::new(Snapshotter::open(&options.root, &store)?);
    let (listener, socket) = Socket::listen(&options.address)?;
    let result = runtime.block_on(serve(listener, snapshotter, options));
    runtime.shutdown_timeout(STOP_GRACE);
    socket.remove();
    result
}

async fn serve(
    listener: std::os::unix::net::UnixListener,
    snapshotter: Arc<Snapshotter>,
    options: &Options,
) -> Result<(), Error> {
    let failed = |doing: &str| {
        let doing = doing.to_owned();
        move |source| Error::Io { doing, source }
    };
    let listener = tokio::net::UnixListener::from_std(listener).map_err(failed("use the socket"))?;
    let mut terminate = signal(SignalKind::terminate()).map_err(failed("catch SIGTERM"))?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed("catch SIGINT"))?;
    let (stopping, stopped) = oneshot::channel();
    let stop = async {
        tokio::select! {
            _ = terminate.recv() => tracing::info!("stopping: SIGTERM"),
            _ = interrupt.recv() => tracing::info!("stopping: SIGINT"),
        }
        notify("STOPPING=1");
        let _ = stopping.send(());
    };
    let out_of_patience = async {
        let _ = stopped.await;
        tokio::time::sleep(STOP_GRACE).await;
    };
    // Directories of snapshots that were removed before a crash; containerd may not ask for long.
    let leftovers = Arc::clone(&snapshotter);
    tokio::task::spawn_blocking(move || {
        if let Err(error) = leftovers.cleanup() {
            tracing::warn!(%error, "cannot free the space of removed snapshots");
        }
    });
    tracing::info!(address = %options.address.display(), root = %options.root.display(), "serving");
    notify("READY=1");
    let server = Server::builder()
        .add_service(SnapshotsServer::new(Service::new(snapshotter)))
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), stop);
    tokio::select! {
        result = server => {
            result.map_err(|e| Error::Io { doing: "serve".to_owned(), source: std::io::Error::other(e) })
        }
        () = out_of_patience => {
            tracing::warn!("stopped while a client was still connected");
            Ok(())
        }
    }
}
