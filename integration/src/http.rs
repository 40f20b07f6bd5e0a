//! The little HTTP/1.1 a test needs: one request per connection, the answer read line by line as it arrives.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};

use anyhow::{Context, Result, anyhow, bail};

/// An answer whose body is still to be read.
#[derive(Debug)]
pub struct Answer {
    /// Status code, for example 200.
    pub status: u16,
    body: Body,
}

impl Answer {
    /// The next line of the body without its line ending; `None` at the end. Blocks until the server sent it.
    pub fn line(&mut self) -> Result<Option<String>> {
        let mut line = String::new();
        let read = self.body.read_line(&mut line).context("cannot read the answer's body")?;
        Ok((read > 0).then(|| line.trim_end_matches(['\r', '\n']).to_owned()))
    }

    /// The whole rest of the body.
    pub fn text(mut self) -> Result<String> {
        let mut text = String::new();
        self.body.read_to_string(&mut text).context("cannot read the answer's body")?;
        Ok(text)
    }
}

type Body = BufReader<Framed>;

/// Sends `POST path` with a JSON body and reads the answer's head.
pub fn post_json(server: SocketAddr, path: &str, json: &str) -> Result<Answer> {
    request(
        server,
        &format!(
            "POST {path} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{json}",
            json.len()
        ),
    )
}

/// Sends `GET path` and reads the answer's head.
pub fn get(server: SocketAddr, path: &str, accept: &str) -> Result<Answer> {
    request(
        server,
        &format!("GET {path} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\nAccept: {accept}\r\n\r\n"),
    )
}

fn request(server: SocketAddr, text: &str) -> Result<Answer> {
    let mut stream = TcpStream::connect(server).with_context(|| format!("cannot connect to {server}"))?;
    stream.set_nodelay(true)?;
    stream.write_all(text.as_bytes()).with_context(|| format!("cannot send a request to {server}"))?;
    let mut reader = BufReader::new(stream);
    let mut head_line = || -> Result<String> {
        let mut line = String::new();
        let read =
            reader.read_line(&mut line).with_context(|| format!("cannot read the answer of {server}"))?;
        if read == 0 {
            bail!("{server} closed the connection before it answered");
        }
        Ok(line.trim_end().to_owned())
    };
    let first = head_line()?;
    let status = first.split(' ').nth(1).and_then(|code| code.parse().ok());
    let status = status.ok_or_else(|| anyhow!("{server} answered {first:?}, which is not HTTP"))?;
    let mut framing = Framing::UntilClose;
    loop {
        let line = head_line()?.to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(length) = line.strip_prefix("content-length:") {
            framing = Framing::Left(length.trim().parse().with_context(|| format!("bad header {line:?}"))?);
        } else if line.strip_prefix("transfer-encoding:").is_some_and(|coding| coding.trim() == "chunked") {
            framing = Framing::Chunked { left: 0 };
        }
    }
    Ok(Answer { status, body: BufReader::new(Framed { reader, framing }) })
}

/// The bytes of a body, without what frames them.
#[derive(Debug)]
struct Framed {
    reader: BufReader<TcpStream>,
    framing: Framing,
}

#[derive(Debug)]
enum Framing {
    UntilClose,
    Left(u64),
    Chunked { left: u64 },
    Done,
}

impl Framed {
    /// Reads the size line of the next chunk, and the line ending of the one before.
    fn next_chunk(&mut self) -> std::io::Result<u64> {
        let mut line = String::new();
        while line.trim().is_empty() {
            line.clear();
            if self.reader.read_line(&mut line)? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
        }
        let size = line.split(';').next().unwrap_or_default().trim();
        u64::from_str_radix(size, 16).map_err(|_| std::io::Error::other(format!("bad chunk size {line:?}")))
    }
}

impl Read for Framed {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let left = match self.framing {
            Framing::UntilClose => return self.reader.read(buffer),
            Framing::Done => return Ok(0),
            Framing::Left(left) => left,
            Framing::Chunked { left: 0 } => self.next_chunk()?,
            Framing::Chunked { left } => left,
        };
        let read = (&mut self.reader).take(left).read(buffer)?;
        if read == 0 && left > 0 && !buffer.is_empty() {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let left = left - read as u64;
        self.framing = match self.framing {
            Framing::Chunked { .. } if read > 0 => Framing::Chunked { left },
            Framing::Left(_) if left > 0 => Framing::Left(left),
            _ => Framing::Done,
        };
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn answer_to(wire: &'static str) -> Answer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = BufReader::new(&stream).lines();
            while request.next().unwrap().unwrap() != "{}" {}
            stream.write_all(wire.as_bytes()).unwrap();
        });
        post_json(server, "/x", "{}\n").unwrap()
    }

    #[test]
    fn chunks_are_joined_across_lines() {
        let mut answer = answer_to(
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\ndata: \r\n4\r\na\n\nb\r\n0\r\n\r\n",
        );
        assert_eq!(answer.status, 200);
        assert_eq!(answer.line().unwrap().as_deref(), Some("data: a"));
        assert_eq!(answer.text().unwrap(), "\nb");
    }

    #[test]
    fn a_length_ends_the_body_and_a_short_body_is_an_error() {
        assert_eq!(answer_to("HTTP/1.1 503 No\r\nContent-Length: 3\r\n\r\nabcdef").text().unwrap(), "abc");
        assert!(answer_to("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc").text().is_err());
        assert!(answer_to("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc").text().is_err());
    }
}
