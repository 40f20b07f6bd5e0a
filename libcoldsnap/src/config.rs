//! The node's configuration: `/etc/coldsnap/config.toml`, read by every part of ColdSnap on the node.
//!
//! Strict: an unknown key, a wrong type or a value out of its range is an error that names file and key. A file that
//! is not there is the default configuration; nothing is mandatory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize, de};

use crate::hub::{Endpoint, Place, Repository};
use crate::store::{DEFAULT_RESERVE, NodeStore, Watermark, Watermarks};

/// Where the configuration is when nothing else is said.
pub const DEFAULT_PATH: &str = "/etc/coldsnap/config.toml";

/// Environment variable that names another file.
pub const PATH_VARIABLE: &str = "COLDSNAP_CONFIG";

/// The whole file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// `[store]`
    pub store: StoreConfig,
    /// `[staging]`
    pub staging: StagingConfig,
    /// `[materialize]`
    pub materialize: MaterializeConfig,
    /// `[huggingface]`
    pub huggingface: HuggingFaceConfig,
    /// `[[sources]]`, tried in this order.
    pub sources: Vec<SourceConfig>,
}

/// `[store]`: the node store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StoreConfig {
    /// Its directory.
    pub root: PathBuf,
    /// Free bytes that a write must leave on the file system.
    pub reserve: Bytes,
    /// Bytes of payloads, or percent of the file system in use (`"85%"`), above which the least recently leased ones
    /// are evicted; none for never.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub high_watermark: Option<Watermark>,
    /// Down to this is evicted; below `high_watermark`, in the same unit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub low_watermark: Option<Watermark>,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            root: NodeStore::DEFAULT_ROOT.into(),
            reserve: Bytes(DEFAULT_RESERVE),
            high_watermark: None,
            low_watermark: None,
        }
    }
}

/// `[staging]`: how payloads are brought to the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub struct StagingConfig {
    /// Bytes per second; none for no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth_limit: Option<Bytes>,
}

/// `[huggingface]`: what every repository of the hub uses that says nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub struct HuggingFaceConfig {
    /// Address of the hub; without it `HF_ENDPOINT`, else the public one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<String>,
    /// File that holds the access token; without it `HF_TOKEN`, else the file that `HF_TOKEN_PATH` names.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
}

/// `[materialize]`: rebuilding payloads from the pinned checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub struct MaterializeConfig {
    /// When; none for the engine's default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<MaterializeMode>,
    /// Directories that are searched for checkpoints: with checkpoint files in them, snapshots of a Hugging Face cache,
    /// or whole caches.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub checkpoints: Vec<PathBuf>,
}

/// When a missing payload is rebuilt from the pinned checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MaterializeMode {
    /// Never.
    Off,
    /// In the background, for the next start.
    Async,
    /// Before the restore.
    Required,
}

/// `[[sources]]`: one place that may have payloads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum SourceConfig {
    /// A directory or mounted share that holds `model-payloads/sha256/<64hex>.pack`.
    Directory {
        /// It.
        path: PathBuf,
    },
    /// A Hugging Face repository at a pinned commit.
    HuggingFace {
        /// `owner/name`
        repository: String,
        /// Commit, 40 hex digits.
        revision: String,
        /// Address of the hub; that of `[huggingface]` when absent.
        #[serde(skip_serializing_if = "Option::is_none")]
        endpoint: Option<String>,
        /// File that holds the access token; that of `[huggingface]` when absent.
        #[serde(skip_serializing_if = "Option::is_none")]
        token_file: Option<PathBuf>,
    },
    /// A repository of an OCI registry.
    Oci {
        /// `host[:port]/name`
        repository: String,
        /// Speak HTTP without TLS.
        #[serde(default)]
        plain_http: bool,
        /// File with credentials in the form of Docker's `config.json`.
        #[serde(skip_serializing_if = "Option::is_none")]
        credentials_file: Option<PathBuf>,
    },
    /// Recovery: the payload is rebuilt from the pinned checkpoint.
    Checkpoint {
        /// Files, directories, snapshots of a Hugging Face cache, or whole caches; those of `[materialize]` when absent.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        paths: Vec<PathBuf>,
    },
}

impl SourceConfig {
    /// The rules of one source; `field` names it in errors.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self, field: &str) -> Result<(), String> {
        match self {
            Self::Directory { path } => absolute(&format!("{field}.path"), Some(path)),
            Self::HuggingFace { repository, revision, endpoint, token_file } => {
                let endpoint = endpoint.as_deref().unwrap_or(crate::hub::PUBLIC_ENDPOINT);
                let endpoint = endpoint.parse().map_err(|e| format!("{field}.endpoint: {e}"))?;
                let repository: Repository =
                    repository.parse().map_err(|e| format!("{field}.repository: {e}"))?;
                Place::new(endpoint, repository, revision).map_err(|e| format!("{field}.revision: {e}"))?;
                absolute(&format!("{field}.token_file"), token_file.as_deref())
            }
            Self::Oci { repository, credentials_file, .. } => {
                if repository.is_empty() {
                    return Err(format!("{field}.repository: empty"));
                }
                absolute(&format!("{field}.credentials_file"), credentials_file.as_deref())
            }
            Self::Checkpoint { paths } => {
                let mut paths = paths.iter().enumerate();
                paths.try_for_each(|(n, path)| absolute(&format!("{field}.paths[{n}]"), Some(path)))
            }
        }
    }
}

fn absolute(field: &str, path: Option<&Path>) -> Result<(), String> {
    match path {
        Some(path) if !path.is_absolute() => {
            Err(format!("{field}: {} is not an absolute path", path.display()))
        }
        _ => Ok(()),
    }
}

/// A number of bytes: an integer, or text with a unit (`"800MB"`, `"1.5 GiB"`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl std::str::FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("{text:?} is not a number of bytes: expected e.g. 1073741824, \"800MB\" or \"1.5GiB\"")
        };
        let text = text.trim();
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let scale: u64 = match unit.trim() {
            "" | "B" => 1,
            "kB" | "KB" => 1000,
            "MB" => 1000_u64.pow(2),
            "GB" => 1000_u64.pow(3),
            "TB" => 1000_u64.pow(4),
            "KiB" => 1 << 10,
            "MiB" => 1 << 20,
            "GiB" => 1 << 30,
            "TiB" => 1 << 40,
            _ => return Err(wrong()),
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(scale).map(Self).ok_or_else(wrong);
        }
        let (whole, fraction) = number.split_once('.').ok_or_else(wrong)?;
        let digits = u32::try_from(fraction.len()).ok().filter(|n| (1..=6).contains(n)).ok_or_else(wrong)?;
        let whole: u64 = whole.parse().map_err(|_| wrong())?;
        let fraction: u64 = fraction.parse().map_err(|_| wrong())?;
        let part = u128::from(fraction) * u128::from(scale) / 10_u128.pow(digits);
        let whole = whole.checked_mul(scale).ok_or_else(wrong)?;
        u64::try_from(part).ok().and_then(|part| whole.checked_add(part)).map(Self).ok_or_else(wrong)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(
            untagged,
            expecting = "expected a number of bytes: an integer, or text with a unit as \"1.5GiB\""
        )]
        enum Form {
            Number(u64),
            Text(String),
        }
        match Form::deserialize(deserializer)? {
            Form::Number(bytes) => Ok(Self(bytes)),
            Form::Text(text) => text.parse().map_err(de::Error::custom),
        }
    }
}

/// The configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system answered.
        source: io::Error,
    },
    /// The file is not as it must be.
    #[error("the configuration {} is wrong: {problem}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong, with line and key.
        problem: String,
    },
}

impl ConfigError {
    /// The stable name of the kind of error.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Io { .. } => "Io",
            Self::Malformed { .. } => "Malformed",
        }
    }
}

impl Config {
    /// Reads the file at `path`; the default configuration when it is not there.
    ///
    /// # Errors
    /// When it cannot be read or breaks a rule.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        match fs::read_to_string(path) {
            Ok(text) => Self::parse(path, &text),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(source) => Err(ConfigError::Io { path: path.to_owned(), source }),
        }
    }

    /// Reads the file that the environment names (`COLDSNAP_CONFIG`), else the one at [`DEFAULT_PATH`].
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn of_node() -> Result<Self, ConfigError> {
        let path = std::env::var_os(PATH_VARIABLE).unwrap_or_else(|| DEFAULT_PATH.into());
        Self::read(Path::new(&path))
    }

    /// Parses a configuration; `path` names it in errors.
    ///
    /// # Errors
    /// When it breaks a rule.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let malformed = |problem: String| ConfigError::Malformed { path: path.to_owned(), problem };
        let config: Self =
            toml::from_str(text).map_err(|e| malformed(e.to_string().trim_end().to_owned()))?;
        config.check().map_err(malformed)?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        let root = &self.store.root;
        if !root.is_absolute() {
            return Err(format!("store.root: {} is not an absolute path", root.display()));
        }
        self.store.watermarks()?;
        if let Some(path) = self.materialize.checkpoints.iter().find(|path| !path.is_absolute()) {
            return Err(format!("materialize.checkpoints: {} is not an absolute path", path.display()));
        }
        if self.staging.bandwidth_limit == Some(Bytes(0)) {
            return Err("staging.bandwidth_limit: 0; leave it out for no limit".to_owned());
        }
        if let Some(endpoint) = &self.huggingface.endpoint {
            endpoint.parse::<Endpoint>().map_err(|e| format!("huggingface.endpoint: {e}"))?;
        }
        absolute("huggingface.token_file", self.huggingface.token_file.as_deref())?;
        for (n, source) in self.sources.iter().enumerate() {
            source.check(&format!("sources[{n}]"))?;
        }
        Ok(())
    }

    /// The configuration as a file, with every default written out.
    ///
    /// # Errors
    /// A value that TOML cannot express.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        toml::to_string(self)
    }

    /// The node store that this configuration describes; creates nothing.
    pub fn node_store(&self) -> NodeStore {
        self.store.at(&self.store.root)
    }
}

impl StoreConfig {
    /// The store at `root` with the limits of this configuration; creates nothing.
    pub fn at(&self, root: &Path) -> NodeStore {
        // They were checked when the file was read.
        NodeStore::at(root).with_reserve(self.reserve.0).with_watermarks(self.watermarks().ok().flatten())
    }

    /// Both watermarks, or none.
    ///
    /// # Errors
    /// When only one is set, or they do not go together.
    pub fn watermarks(&self) -> Result<Option<Watermarks>, String> {
        match (self.high_watermark, self.low_watermark) {
            (None, None) => Ok(None),
            (Some(high), Some(low)) => Watermarks::new(high, low)
                .map(Some)
                .map_err(|problem| format!("store.low_watermark: {problem}")),
            _ => Err("store: high_watermark and low_watermark are set both or not at all".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(Path::new("config.toml"), text).map_err(|e| e.to_string())
    }

    #[test]
    fn nothing_is_mandatory() {
        assert_eq!(parse("").unwrap(), Config::default());
        assert_eq!(Config::read(Path::new("/does/not/exist.toml")).unwrap(), Config::default());
    }

    #[test]
    fn every_key_is_understood() {
        let config = parse(
            r#"
            [store]
            root = "/srv/coldsnap"
            reserve = 0
            high_watermark = "1.5 TiB"
            low_watermark = "800GB"
            [staging]
            bandwidth_limit = "100MB"
            [materialize]
            mode = "required"
            checkpoints = ["/srv/models", "/root/.cache/huggingface/hub"]
            [huggingface]
            endpoint = "https://hub.example"
            token_file = "/etc/coldsnap/hub-token"
            [[sources]]
            kind = "directory"
            path = "/mnt/share"
            [[sources]]
            kind = "huggingface"
            repository = "owner/name"
            revision = "0123456789012345678901234567890123456789"
            token_file = "/etc/coldsnap/token"
            [[sources]]
            kind = "oci"
            repository = "registry.example/payloads"
            plain_http = true
            [[sources]]
            kind = "checkpoint"
            [[sources]]
            kind = "checkpoint"
            paths = ["/models", "/cache"]
            "#,
        )
        .unwrap();
        assert_eq!(config.store.high_watermark, Some(Watermark::Bytes(3 << 39)));
        assert_eq!(config.store.low_watermark, Some(Watermark::Bytes(800_000_000_000)));
        assert_eq!(config.staging.bandwidth_limit, Some(Bytes(100_000_000)));
        assert_eq!(config.materialize.mode, Some(MaterializeMode::Required));
        assert_eq!(config.materialize.checkpoints[0], Path::new("/srv/models"));
        assert_eq!(parse(&config.to_toml().unwrap()).unwrap(), config, "what is printed can be read");
        assert_eq!(config.sources.len(), 5);
        assert_eq!(config.node_store().root(), Path::new("/srv/coldsnap"));
    }

    #[test]
    fn errors_name_file_and_key() {
        for (text, expected) in [
            ("[store]\nroots = \"/x\"", "roots"),
            ("[stores]", "stores"),
            ("[store]\nroot = \"x\"", "store.root"),
            ("[store]\nreserve = \"1 parsec\"", "parsec"),
            ("[store]\nreserve = -1", "reserve"),
            ("[store]\nhigh_watermark = 5", "low_watermark"),
            ("[store]\nhigh_watermark = 5\nlow_watermark = 5", "store.low_watermark"),
            ("[store]\nhigh_watermark = \"90%\"\nlow_watermark = 5", "both in percent"),
            ("[store]\nhigh_watermark = \"101%\"\nlow_watermark = \"5%\"", "101%"),
            ("[materialize]\nmode = \"sometimes\"", "sometimes"),
            ("[materialize]\ncheckpoints = [\"models\"]", "materialize.checkpoints"),
            ("[[sources]]\nkind = \"ftp\"", "ftp"),
            ("[[sources]]\nkind = \"checkpoint\"\npaths = [\"models\"]", "sources[0].paths[0]"),
            ("[[sources]]\nkind = \"directory\"", "path"),
            ("[[sources]]\nkind = \"directory\"\npath = \"/x\"\nuser = \"y\"", "user"),
            ("[staging]\nbandwidth_limit = 0", "staging.bandwidth_limit"),
            ("[huggingface]\nendpoint = \"hub.example\"", "huggingface.endpoint"),
            ("[huggingface]\ntoken_file = \"token\"", "huggingface.token_file"),
            ("[huggingface]\ntoken = \"hf_x\"", "token"),
            ("[[sources]]\nkind = \"directory\"\npath = \"share\"", "sources[0].path"),
            (
                "[[sources]]\nkind = \"huggingface\"\nrepository = \"a/b\"\nrevision = \"main\"",
                "sources[0].revision",
            ),
            (
                "[[sources]]\nkind = \"huggingface\"\nrepository = \"../b\"\n\
                 revision = \"0123456789012345678901234567890123456789\"",
                "sources[0].repository",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains("config.toml") && error.contains(expected), "{text}: {error}");
        }
    }
}
