//! Layers in the options of an overlayfs mount, as snapshotters write them.

use std::path::{Path, PathBuf};

const LOWER: &str = "lowerdir=";
/// Characters that separate layers or options, or escape them.
const SPECIAL: [char; 3] = [':', ',', '\\'];

/// The lower layers, the uppermost first; `None` when the options name none.
pub fn lower_layers(options: &[String]) -> Option<Vec<PathBuf>> {
    let list = options.iter().find_map(|option| option.strip_prefix(LOWER))?;
    Some(list.split(':').map(PathBuf::from).collect())
}

/// The options with `layers` (the uppermost first) above the other lower layers.
///
/// # Errors
/// Why that is not possible.
pub fn with_layers(options: &[String], layers: &[PathBuf]) -> Result<Vec<String>, String> {
    let mut list = String::new();
    for layer in layers {
        list.push_str(option_text(layer)?);
        list.push(':');
    }
    if !options.iter().any(|option| option.starts_with(LOWER)) {
        return Err("the root filesystem has no lower layers to put an overlay on".to_owned());
    }
    let add = |option: &String| match option.strip_prefix(LOWER) {
        Some(lower) => format!("{LOWER}{list}{lower}"),
        None => option.clone(),
    };
    Ok(options.iter().map(add).collect())
}

/// The options of an overlay on the same lower layers with another upper layer.
///
/// # Errors
/// Why that is not possible.
pub fn with_upper(options: &[String], upper: &Path, work: &Path) -> Result<Vec<String>, String> {
    let lower = options.iter().find(|option| option.starts_with(LOWER));
    let lower = lower.ok_or("the root filesystem has no lower layers")?;
    let upper = format!("upperdir={}", option_text(upper)?);
    Ok(vec![format!("workdir={}", option_text(work)?), upper, lower.clone()])
}

fn option_text(path: &Path) -> Result<&str, String> {
    let text = path.to_str().filter(|text| path.is_absolute() && !text.contains(SPECIAL));
    text.ok_or_else(|| format!("{} cannot stand in mount options", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Vec<String> {
        ["workdir=/w", "upperdir=/u", "lowerdir=/b:/a", "index=off"].map(str::to_owned).to_vec()
    }

    #[test]
    fn layers_go_on_top_of_the_lower_ones() {
        assert_eq!(lower_layers(&options()).unwrap(), [Path::new("/b"), Path::new("/a")]);
        let layers = ["/o/capsule", "/o/changes"].map(PathBuf::from);
        assert_eq!(
            with_layers(&options(), &layers).unwrap(),
            ["workdir=/w", "upperdir=/u", "lowerdir=/o/capsule:/o/changes:/b:/a", "index=off"]
        );
        assert_eq!(
            with_upper(&options(), Path::new("/new"), Path::new("/work")).unwrap(),
            ["workdir=/work", "upperdir=/new", "lowerdir=/b:/a"]
        );
    }

    #[test]
    fn what_cannot_be_layered_is_said() {
        assert_eq!(lower_layers(&["ro".to_owned(), "rbind".to_owned()]), None);
        assert!(with_layers(&["rbind".to_owned()], &["/o".into()]).is_err());
        for path in ["/a:b", "/a,b", "relative", "/a\\b"] {
            assert!(with_layers(&options(), &[path.into()]).unwrap_err().contains(path), "{path}");
        }
    }
}
