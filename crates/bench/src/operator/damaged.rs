//! The end of a life with a damaged cache: it is served as far as it is readable, or refused for a
//! documented reason. Reads return correct data or an error. Blocks with errors are written again;
//! then everything is drained, and the primaries alone are complete.

use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};

use super::Log;
use super::client::{Client, Trouble};
use super::model::BLOCK;
use super::offline::damage;
use super::pool::Pool;
use super::volume::{BLOCKS, Volume};
use forebay_block::testing::Numbers;

/// Pause before a write that failed is sent again.
const PAUSE: Duration = Duration::from_millis(100);
/// The way out that a refusal must name, if there is one: a start with this flag.
const ACCEPT: &str = "--accept-data-loss";

/// Damages the cache of a killed server, and checks the outcome.
pub fn end(pool: &mut Pool, numbers: &mut Numbers, log: &Log) -> anyhow::Result<()> {
    if !damage(pool, numbers, log)? {
        return Ok(());
    }
    if let Err(said) = pool.try_start(&[])? {
        ensure!(said.contains(ACCEPT), "a damaged cache was refused for another reason: {said}");
        log.say(&format!("refused: {said}"));
        match pool.try_start(&[ACCEPT.to_owned()])? {
            Ok(_) => log.say("a loss is accepted"),
            // A cache that contradicts itself is not served at all.
            Err(said) => {
                ensure!(said.contains("salvage"), "refused without a way out: {said}");
                log.say(&format!("refused: {said}"));
                return Ok(());
            }
        }
        for volume in &mut pool.volumes {
            volume.model.anything();
        }
    }
    let lost = unreadable(pool)?;
    all_are_listed(pool, &lost)?;
    let count: usize = lost.iter().map(Vec::len).sum();
    log.say(&format!("{count} blocks are lost, and written again; stop --drain"));
    write_again(pool, &lost)?;
    pool.must(&["stop", "--drain"])?;
    pool.ended()?;
    pool.served().try_for_each(Volume::check_alone)
}

fn connect(pool: &Pool, volume: &Volume) -> anyhow::Result<Client> {
    let client = Client::connect(&pool.socket(), &volume.name);
    client.map_err(|trouble| anyhow!("volume {}: {trouble}", volume.name))
}

/// The unreadable blocks of each volume. All others are compared.
fn unreadable(pool: &Pool) -> anyhow::Result<Vec<Vec<u64>>> {
    let of = |volume: &Volume| {
        let mut client = connect(pool, volume)?;
        let mut found = vec![0; BLOCK];
        let mut lost = Vec::new();
        for block in 0..BLOCKS {
            match client.read(block * BLOCK as u64, &mut found) {
                Ok(()) => volume
                    .model
                    .check(block, &found)
                    .with_context(|| format!("volume {}, whose cache is damaged", volume.name))?,
                Err(Trouble::Refused(_)) => lost.push(block),
                Err(trouble) => bail!("volume {}: {trouble}", volume.name),
            }
        }
        Ok(lost)
    };
    pool.served().map(of).collect()
}

/// Checks that all blocks with errors are listed in the status.
fn all_are_listed(pool: &Pool, lost: &[Vec<u64>]) -> anyhow::Result<()> {
    let status = pool.status()?;
    for (volume, lost) in pool.served().zip(lost) {
        let shown = status["volumes"].as_array().context("a status has volumes")?;
        let shown = shown.iter().find(|shown| shown["name"] == volume.name.as_str());
        let ranges = shown.and_then(|shown| shown["lost"].as_array()).context("a list")?;
        let holds = |block: &&u64| {
            let at = **block * BLOCK as u64;
            ranges.iter().any(|range| {
                let number = |name: &str| range[name].as_u64().unwrap_or_default();
                (number("offset")..number("offset") + number("length")).contains(&at)
            })
        };
        let hidden = lost.iter().find(|block| !holds(block));
        ensure!(hidden.is_none(), "block {hidden:?} of {} is lost and not listed", volume.name);
    }
    Ok(())
}

fn write_again(pool: &mut Pool, lost: &[Vec<u64>]) -> anyhow::Result<()> {
    let mut volumes = std::mem::take(&mut pool.volumes);
    let outcome = volumes.iter_mut().filter(|volume| volume.served).zip(lost).try_for_each(
        |(volume, lost)| {
            let mut client = connect(pool, volume)?;
            let say = |trouble| anyhow!("block of {} written again: {trouble}", volume.name);
            for &block in lost {
                let version = volume.model.version();
                let bytes = volume.model.bytes(block, 1, version);
                while let Err(trouble) = client.write(block * BLOCK as u64, &bytes, true) {
                    let waits = matches!(trouble, Trouble::Refused(_));
                    ensure!(waits && volume.notice.failed().is_ok(), say(trouble));
                    std::thread::sleep(PAUSE);
                }
                volume.model.changed(block, version, true);
            }
            Ok(())
        },
    );
    pool.volumes = volumes;
    outcome
}
