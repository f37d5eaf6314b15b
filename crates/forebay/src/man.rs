//! `forebay man-pages`: writes the manual pages, made from the declarations of the commands and
//! from the table of settings. Packages and `make install` call it.

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory};
use clap_mangen::generate_to;
use clap_mangen::roff::{Roff, bold, italic, roman};
use forebay_control::settings::{Flag, Initial, Kind, Section, Spec};

use crate::cli::Cli;

/// The page about the configuration file.
const CONFIGURATION: &str = "man5/forebay.toml.5";

/// Arguments of `forebay man-pages`.
#[derive(Args, Debug)]
pub struct ManArgs {
    /// The directory of man1 and man5
    directory: PathBuf,
}

/// Writes a page for each command, and the one about the configuration file.
pub fn run(args: &ManArgs) -> anyhow::Result<()> {
    for section in ["man1", "man5"] {
        fs::create_dir_all(args.directory.join(section))?;
    }
    generate_to(Cli::command(), args.directory.join("man1"))?;
    write(&args.directory, &configuration().to_roff())
}

fn write(directory: &Path, page: &str) -> anyhow::Result<()> {
    Ok(fs::write(directory.join(CONFIGURATION), page)?)
}

/// The page about the configuration file.
fn configuration() -> Roff {
    let mut page = Roff::new();
    let source = concat!("forebay ", env!("CARGO_PKG_VERSION"));
    page.control("TH", ["forebay.toml", "5", "", source, ""]);
    page.control("SH", ["NAME"]);
    page.text([roman("forebay.toml - configuration of a Forebay server")]);
    page.control("SH", ["SYNOPSIS"]);
    page.text([roman("/etc/forebay/forebay.toml")]);
    page.control("SH", ["DESCRIPTION"]);
    page.text([
        bold("forebay serve --config FILE"),
        roman(
            " reads a TOML file with the sections below. Unknown keys and values out of range are \
             refused, with the line. Sizes are written 512KiB, 4GiB; times 500ms, 30s, 10m, 1h; \
             shares 50%. ",
        ),
        bold("forebay set"),
        roman(" changes the settings marked \"Changed: at once.\" while the server runs."),
    ]);
    for (name, section) in Section::NAMES {
        let heading =
            if section == Section::Volume { format!("[[{name}]]") } else { format!("[{name}]") };
        page.control("SH", [heading.as_str()]);
        section.settings().for_each(|spec| setting(&mut page, spec));
    }
    page.control("SH", ["SEE ALSO"]);
    page.text([
        bold("forebay-serve"),
        roman("(1), "),
        bold("forebay-set"),
        roman("(1), /usr/share/doc/forebay/docs/user/configuration.md"),
    ]);
    page
}

/// The paragraph about a setting.
fn setting(page: &mut Roff, spec: &Spec) {
    page.control("TP", []);
    let values = match spec.kind {
        Kind::Choice(names) => names().join(", "),
        Kind::Bool => "true, false".to_owned(),
        kind => kind.range().unwrap_or_default(),
    };
    page.text([bold(spec.key), roman(" = "), italic(value(spec))]);
    let mut facts = vec![format!("{}.", spec.help)];
    if !values.is_empty() {
        facts.push(format!("Values: {values}."));
    }
    match spec.default {
        Initial::Value(text) => facts.push(format!("Default: {text}.")),
        Initial::Unset("") => {}
        Initial::Unset(said) => facts.push(format!("Default: {said}.")),
        Initial::Required => facts.push("Required.".to_owned()),
    }
    if spec.flag == Flag::None {
        facts.push("There is no flag for it.".to_owned());
    }
    facts.push(format!("Changed: {}.", spec.online.word()));
    page.text([roman(facts.join(" "))]);
}

/// The kind of a value, as the file writes it.
fn value(spec: &Spec) -> &'static str {
    match spec.kind {
        Kind::Bool => "boolean",
        Kind::Number(_) => "number",
        Kind::Size(_) => "\"size\"",
        Kind::Percent(_) | Kind::Share(_) => "\"share\"",
        Kind::Time(_) => "\"time\"",
        Kind::List(_) => "[\"text\", ...]",
        Kind::Choice(_) | Kind::Text(_) => "\"text\"",
    }
}

#[cfg(test)]
mod tests {
    use forebay_control::settings::TABLE;

    use super::*;

    #[test]
    fn the_page_has_every_setting() {
        let page = configuration().to_roff();
        for spec in TABLE {
            let key = spec.key.replace('-', "\\-");
            assert!(page.contains(&format!("\\fB{key}\\fR = ")), "{}: {page}", spec.key);
        }
    }
}
