//! An OCI registry for stories: Debian's `docker-registry` as a process on the node, with its storage in a directory that a story can look
//! into and damage. It is stopped when it is dropped; its storage stays until the node goes.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::http;
use crate::process::wait_for;

/// Emptied at each start; it is not kept with the logs, because payloads are large.
const STORAGE: &str = "/var/lib/registry";
const READY_LIMIT: Duration = Duration::from_secs(20);

/// A registry, running or not.
#[derive(Debug)]
pub struct Registry {
    address: String,
    logs: PathBuf,
    child: Option<Child>,
}

/// A line of the registry's access log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Access {
    /// Request method.
    pub method: String,
    /// Path with its query.
    pub path: String,
    /// Status code of the answer.
    pub status: u16,
    /// Bytes of the answer's body.
    pub bytes: u64,
}

impl Registry {
    /// Starts a registry with empty storage on a free loopback port; its configuration and log go to `logs`. With a line of an htpasswd file
    /// (bcrypt) it asks for user and password.
    pub fn start(logs: &Path, htpasswd: Option<&str>) -> Result<Self> {
        let _ = fs::remove_dir_all(STORAGE);
        fs::create_dir_all(STORAGE).with_context(|| format!("cannot create {STORAGE}"))?;
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let address = format!("127.0.0.1:{port}");
        let mut config = format!(
            "version: 0.1\nlog:\n  level: info\nstorage:\n  filesystem:\n    rootdirectory: {STORAGE}\n  delete:\n    enabled: true\nhttp:\n  addr: {address}\n"
        );
        if let Some(line) = htpasswd {
            let path = logs.join("htpasswd");
            fs::write(&path, line).with_context(|| format!("cannot write {}", path.display()))?;
            config += &format!("auth:\n  htpasswd:\n    realm: story\n    path: {}\n", path.display());
        }
        let mut registry = Self { address, logs: logs.to_owned(), child: None };
        fs::write(registry.config(), config).context("cannot write the registry's configuration")?;
        registry.restart()?;
        Ok(registry)
    }

    /// Starts it again with the storage it had.
    pub fn restart(&mut self) -> Result<()> {
        self.kill()?;
        let log = File::options().create(true).append(true).open(self.log())?;
        let mut command = Command::new("docker-registry");
        command.arg("serve").arg(self.config()).stdout(log.try_clone()?).stderr(log);
        self.child =
            Some(command.spawn().context("cannot start docker-registry: is it in the node's root?")?);
        wait_for("the registry", READY_LIMIT, || {
            if let Some(status) = self.child.as_mut().map(Child::try_wait).transpose()?.flatten() {
                bail!("the registry ended with {status} before it was ready: see {}", self.log().display());
            }
            Ok(TcpStream::connect(&self.address).ok())
        })?;
        Ok(())
    }

    /// Kills it with SIGKILL: connections break, its storage is as it is.
    pub fn kill(&mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill().context("cannot kill the registry")?;
            child.wait().context("cannot wait for the registry")?;
        }
        Ok(())
    }

    /// `127.0.0.1:port`
    pub fn address(&self) -> &str {
        &self.address
    }

    /// `127.0.0.1:port/name`
    pub fn repository(&self, name: &str) -> String {
        format!("{}/{name}", self.address)
    }

    fn log(&self) -> PathBuf {
        self.logs.join("registry.log")
    }

    fn config(&self) -> PathBuf {
        self.logs.join("registry.yml")
    }

    /// The file in which the registry keeps a blob.
    pub fn blob(&self, digest: &str) -> PathBuf {
        let hex = digest.trim_start_matches("sha256:");
        root().join("blobs/sha256").join(&hex[..2]).join(hex).join("data")
    }

    /// The directory of a tag of a repository; it exists when the tag does.
    pub fn tag(&self, name: &str, tag: &str) -> PathBuf {
        root().join("repositories").join(name).join("_manifests/tags").join(tag)
    }

    /// The directory of unfinished uploads to a repository.
    pub fn uploads(&self, name: &str) -> PathBuf {
        root().join("repositories").join(name).join("_uploads")
    }

    /// Bytes of all files that it keeps.
    pub fn stored_bytes(&self) -> Result<u64> {
        crate::node::bytes_below(Path::new(STORAGE))
    }

    /// A document that it serves, as JSON.
    pub fn get(&self, path: &str, accept: &str) -> Result<Value> {
        let answer = http::get(self.address.parse()?, path, accept)?;
        if answer.status != 200 {
            bail!("GET {path}: status {}", answer.status);
        }
        Ok(serde_json::from_str(&answer.text()?)?)
    }

    /// Every request so far, in the order in which they ended.
    pub fn requests(&self) -> Result<Vec<Access>> {
        let log = fs::read_to_string(self.log()).context("cannot read the registry's log")?;
        Ok(log.lines().filter_map(access).collect())
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

fn root() -> PathBuf {
    Path::new(STORAGE).join("docker/registry/v2")
}

/// A line in the combined log format: `host - - [time] "METHOD path HTTP/1.1" status bytes "referer" "agent"`.
fn access(line: &str) -> Option<Access> {
    let mut quoted = line.split('"');
    let request = quoted.next().filter(|head| head.ends_with("] ")).and(quoted.next())?;
    let mut words = request.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut numbers = quoted.next()?.split_whitespace();
    let status = numbers.next()?.parse().ok()?;
    // A dash stands for no body.
    let bytes = numbers.next()?.parse().unwrap_or(0);
    Some(Access { method, path, status, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_access_log_is_understood() {
        let line = r#"127.0.0.1 - - [30/Nov/2026:21:00:00 +0000] "GET /v2/a/blobs/sha256:ab HTTP/1.1" 206 4096 "" "coldsnap/0.1.0""#;
        let found = access(line).unwrap();
        assert_eq!((found.method.as_str(), found.status, found.bytes), ("GET", 206, 4096));
        assert_eq!(found.path, "/v2/a/blobs/sha256:ab");
        assert_eq!(access(r#"time="x" level=info msg="response completed" http.request.method=GET"#), None);
    }
}
