//! `coldsnap overlay explain`: every binding of every overlay of a capsule, and which overlay a start would use.

use std::path::Path;

use coldsnap::node::{self, ToolVersions};
use coldsnap::overlay::{self, Binding, Portable, choose, explain};
use coldsnap::store::NodeStore;
use serde::Serialize;

use super::{Client, portable_of_file, portable_of_image};
use crate::output::{CliError, Output};
use crate::tools;

/// Say of each overlay of a capsule which of its bindings hold here, and which overlay a start would use.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A capsule image in containerd, or a file `artifact.json`.
    #[arg(value_name = "IMAGE|FILE")]
    capsule: String,
    /// The OCI runtime that the shim uses.
    #[arg(long, value_name = "PROGRAM", default_value = "runc")]
    runtime: String,
    #[command(flatten)]
    client: Client,
}

#[derive(Serialize)]
struct Explanation {
    portable_descriptor: String,
    /// Id of the overlay that a start would use; null: the portable capsule.
    chosen: Option<String>,
    /// Why this machine cannot be described, so that no overlay is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    machine: Option<String>,
    overlays: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    id: String,
    chosen: bool,
    /// Why it is never used, whatever this machine is.
    #[serde(skip_serializing_if = "Option::is_none")]
    unusable: Option<String>,
    bindings: Vec<Binding>,
}

pub fn run(args: &Args, store: &NodeStore, output: &Output) -> Result<(), CliError> {
    let path = Path::new(&args.capsule);
    let portable = if path.is_file() {
        portable_of_file(path)?
    } else {
        let runtime = tokio::runtime::Runtime::new().map_err(|e| CliError::new("Io", e))?;
        runtime.block_on(async {
            let containerd = args.client.connect().await.map_err(|e| CliError::new("Containerd", e))?;
            portable_of_image(&containerd, &args.capsule).await
        })?
    };
    let explanation = explanation(args, store, &portable)?;
    output.result(&explanation, || explanation.text())
}

fn explanation(args: &Args, store: &NodeStore, portable: &Portable) -> Result<Explanation, CliError> {
    let tools = ToolVersions { criu: tools::version("criu"), runc: tools::version(&args.runtime) };
    let here = node::target(&tools);
    let chosen = choose(store, portable, || node::target(&tools))?.chosen;
    let chosen = chosen.map(|chosen| chosen.overlay.id().to_owned());
    let rows = overlay::of(store, &portable.digest)?.into_iter().map(|found| {
        let (bindings, unusable) = match found.overlay {
            Ok(overlay) => (explain(&overlay, portable, here.as_ref().ok()), None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        Row { chosen: chosen.as_ref() == Some(&found.id), id: found.id, unusable, bindings }
    });
    let overlays = rows.collect();
    Ok(Explanation {
        portable_descriptor: portable.digest.to_string(),
        machine: here.err().map(|error| error.to_string()),
        overlays,
        chosen,
    })
}

impl Explanation {
    fn text(&self) -> String {
        let mut lines = Vec::new();
        for row in &self.overlays {
            lines.push(format!("overlay {}{}", row.id, if row.chosen { " (a start uses it)" } else { "" }));
            lines.extend(row.unusable.iter().map(|reason| format!("  unusable: {reason}")));
            for binding in &row.bindings {
                let Binding { field, captured, here, equal } = binding;
                let (captured, here) = (short(captured), short(here));
                lines.push(match equal {
                    true => format!("  =  {field:<30} {captured}"),
                    false => {
                        format!("  != {field:<30} captured: {captured}\n     {:<30} here:     {here}", "")
                    }
                });
            }
        }
        lines.extend(
            self.machine.iter().map(|reason| format!("no overlay is used on this machine: {reason}")),
        );
        lines.push(match (&self.chosen, self.overlays.is_empty()) {
            (Some(id), _) => format!("a start uses overlay {id}"),
            (None, true) => "there is no overlay: a start uses the portable capsule".to_owned(),
            (None, false) => "no overlay fits: a start uses the portable capsule".to_owned(),
        });
        lines.join("\n")
    }
}

/// A long list of CPU features is for `--json`.
fn short(value: &str) -> String {
    const LIMIT: usize = 100;
    match value.char_indices().nth(LIMIT) {
        Some((end, _)) => format!("{}... ({} characters, see --json)", &value[..end], value.len()),
        None => value.to_owned(),
    }
}
