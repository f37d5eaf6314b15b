//! `forebay set`: changes settings of a volume while it serves.

use forebay_control::api::VolumeSettings;

use crate::WrongUsage;
use crate::cli::{SetArgs, Setting};
use crate::output;

/// Changes the settings.
pub fn run(args: &SetArgs) -> anyhow::Result<()> {
    let settings = settings(&args.settings)?;
    let client = args.daemon.client();
    let volume = client.set(&args.volume, &settings)?;
    let cache = client.status()?.cache;
    let (mode, eviction, content) = (volume.mode, cache.eviction, cache.content);
    let name = volume.name;
    let line = match args.json {
        true => serde_json::json!({
            "volume": name, "mode": mode, "eviction": eviction, "content": content,
        })
        .to_string(),
        false => format!("{name}: mode={mode} eviction={eviction} content={content}"),
    };
    Ok(output::line(&line)?)
}

fn settings(given: &[Setting]) -> Result<VolumeSettings, WrongUsage> {
    let mut settings = VolumeSettings::default();
    for Setting { key, value } in given {
        let place = match key.as_str() {
            "mode" => &mut settings.mode,
            "eviction" => &mut settings.eviction,
            "content" => &mut settings.content,
            _ => unreachable!("a setting is one of SETTINGS"),
        };
        if place.replace(value.clone()).is_some() {
            return Err(WrongUsage(format!("{key} is given twice; give it once")));
        }
    }
    Ok(settings)
}
