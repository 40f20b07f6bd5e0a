//! Just enough of an HTTP/1.1 server: one request per connection, a thread each.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

#[derive(Debug, Default)]
pub struct Request {
    pub method: String,
    /// Without the query.
    pub path: String,
    pub query: String,
    headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    fn read(stream: &TcpStream) -> Option<Self> {
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let mut words = line.split_whitespace();
        let method = words.next()?.to_owned();
        let target = words.next()?;
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let mut request = Self { method, path: path.to_owned(), query: query.to_owned(), ..Self::default() };
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).ok()?;
            let Some((name, value)) = line.trim_end().split_once(':') else { break };
            request.headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        if let Some(length) = request.header("content-length") {
            request.body = vec![0; length.parse().ok()?];
            reader.read_exact(&mut request.body).ok()?;
        } else if request.header("transfer-encoding") == Some("chunked") {
            loop {
                let mut size = String::new();
                reader.read_line(&mut size).ok()?;
                let mut chunk = vec![0; usize::from_str_radix(size.trim(), 16).ok()? + 2];
                reader.read_exact(&mut chunk).ok()?;
                chunk.truncate(chunk.len() - 2);
                if chunk.is_empty() {
                    break;
                }
                request.body.extend(chunk);
            }
        }
        Some(request)
    }
}

#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Closes the connection after so many bytes of the body.
    pub cut: Option<usize>,
}

impl Response {
    pub fn new(status: u16) -> Self {
        Self { status, headers: Vec::new(), body: Vec::new(), cut: None }
    }

    pub fn json(value: &serde_json::Value) -> Self {
        Self { body: value.to_string().into_bytes(), ..Self::new(200) }
    }

    pub fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.headers.push((name.to_owned(), value.to_string()));
        self
    }

    fn write(&self, stream: &mut TcpStream, head: bool) -> std::io::Result<()> {
        let mut text = format!("HTTP/1.1 {} -\r\nConnection: close\r\n", self.status);
        if !head {
            text += &format!("Content-Length: {}\r\n", self.body.len());
        }
        for (name, value) in &self.headers {
            text += &format!("{name}: {value}\r\n");
        }
        stream.write_all((text + "\r\n").as_bytes())?;
        let end = self.cut.unwrap_or(self.body.len()).min(self.body.len());
        if !head {
            stream.write_all(&self.body[..end])?;
        }
        stream.flush()
    }
}

/// Serves until it is dropped.
#[derive(Debug)]
pub struct Server {
    pub address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start(
        listener: TcpListener,
        answer: impl Fn(Request) -> Response + Send + Sync + 'static,
    ) -> Self {
        let address = listener.local_addr().unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let answer = Arc::new(answer);
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut workers = Vec::new();
            for stream in listener.incoming() {
                if stopped.load(Ordering::SeqCst) {
                    break;
                }
                let Ok(mut stream) = stream else { continue };
                let answer = answer.clone();
                workers.push(std::thread::spawn(move || {
                    let Some(request) = Request::read(&stream) else { return };
                    let head = request.method == "HEAD";
                    // The client may be gone.
                    let _ = answer(request).write(&mut stream, head);
                }));
            }
            for worker in workers {
                let _ = worker.join();
            }
        });
        Self { address, stop, thread: Some(thread) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
