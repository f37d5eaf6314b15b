//! Checks across settings: endpoints and their certificates, distinct names and primaries of
//! volumes, shares of the cache and of the dirty limit.

use std::collections::BTreeSet;
use std::path::Path;

use forebay_block::{NAME_BYTES_MAX, VOLUMES_MAX};
use forebay_engine::{GUARANTEED_MAX_PERCENT, Part};

use super::{Config, ConfigError, ServerConfig, TlsPolicy, VolumeConfig, invalid};
use crate::units::Share;

impl Config {
    /// Checks the settings against each other.
    ///
    /// # Errors
    /// Names the first key that conflicts with others.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.check_shares()?;
        if self.cache.path.as_os_str().is_empty() {
            return Err(invalid("cache.path", "is empty", "name a block device or a file"));
        }
        self.check_server()?;
        self.web.check()?;
        self.events.check()?;
        let count = self.volumes.len();
        if !(1..=VOLUMES_MAX).contains(&count) {
            let hint = format!("give 1 to {VOLUMES_MAX} [[volume]] sections");
            return Err(invalid("volume", format!("{count} volumes"), &hint));
        }
        let mut names = BTreeSet::new();
        let mut primaries = BTreeSet::from([location(&self.cache.path.to_string_lossy())]);
        let cache = primaries.clone();
        for volume in &self.volumes {
            volume.check()?;
            let name = &volume.name;
            if !names.insert(name) {
                let what = format!("two volumes are named {name:?}");
                return Err(invalid("volume.name", what, "give each its own name"));
            }
            let place = location(&volume.primary);
            if cache.contains(&place) {
                let what = format!("{:?} is the cache device", volume.primary);
                let hint = "the cache would overwrite the data; name two different devices";
                return Err(invalid(format!("volume {name:?}: primary"), what, hint));
            }
            if !primaries.insert(place) {
                let what = format!("{:?} is already the primary of a volume", volume.primary);
                let hint = "serve it once; several clients may share a volume";
                return Err(invalid(format!("volume {name:?}: primary"), what, hint));
            }
        }
        self.check_rules()
    }

    /// Checks the volumes' shares of the cache and of the dirty limit: the guarantees add up to no
    /// more than may be guaranteed, and none is more than the volume may have.
    ///
    /// # Errors
    /// Names the first share that conflicts with others.
    pub fn check_shares(&self) -> Result<(), ConfigError> {
        self.check_guarantees(
            ("cache_guarantee", "cache_limit"),
            (GUARANTEED_MAX_PERCENT, "cache"),
            |volume| (volume.cache_guarantee, volume.cache_limit),
        )?;
        self.check_guarantees(("dirty_guarantee", "dirty_limit"), (100, "dirty limit"), |volume| {
            (volume.dirty_guarantee, volume.dirty_limit)
        })
    }

    /// Checks the guarantees and limits that `of` gives of each volume: settings with these names,
    /// of which `(percent, whole)` may be guaranteed. Those in bytes are only compared with each
    /// other: the engine scales guarantees down that exceed the whole.
    fn check_guarantees(
        &self,
        (guarantee, limit): (&str, &str),
        (most, whole): (u8, &str),
        of: impl Fn(&VolumeConfig) -> (Option<Share>, Option<Share>),
    ) -> Result<(), ConfigError> {
        let all = self.volumes.iter().filter_map(|volume| of(volume).0);
        let percents = all.filter_map(|share| match share.0 {
            Part::Percent(percent) => Some(u64::from(percent)),
            Part::Bytes(_) => None,
        });
        let sum: u64 = percents.sum();
        if sum > u64::from(most) {
            let what = format!("all of them together are {sum}%");
            let hint = format!("guarantee {most}% of the {whole} at most");
            return Err(invalid(format!("volume.{guarantee}"), what, &hint));
        }
        for volume in &self.volumes {
            let (least, most) = of(volume);
            let exceeds = |(least, most): &(Share, Share)| match (least.0, most.0) {
                (Part::Percent(least), Part::Percent(most)) => least > most,
                (Part::Bytes(least), Part::Bytes(most)) => least > most,
                _ => false,
            };
            if let Some((least, most)) = least.zip(most).filter(exceeds) {
                let key = format!("volume {:?}: {guarantee}", volume.name);
                let what = format!("{least} is more than the volume's {limit}, {most}");
                return Err(invalid(key, what, &format!("use a share up to {limit}")));
            }
        }
        Ok(())
    }

    fn check_server(&self) -> Result<(), ConfigError> {
        let server = &self.server;
        if server.nbd.is_empty() && server.fuse.is_none() {
            let hint = "name at least one, as in nbd = [\"unix:/run/forebay/nbd.sock\"], or a \
                        directory, as in fuse = \"/mnt/forebay\"";
            return Err(invalid("server.nbd", "no endpoint for clients", hint));
        }
        if server.fuse.as_ref().is_some_and(|dir| dir.as_os_str().is_empty()) {
            return Err(invalid("server.fuse", "is empty", "name a directory"));
        }
        let distinct: BTreeSet<_> = server.nbd.iter().map(|listen| &listen.at).collect();
        if distinct.len() != server.nbd.len() {
            let what = "the same endpoint is listed twice";
            return Err(invalid("server.nbd", what, "name each once"));
        }
        server.check_tls()
    }
}

impl ServerConfig {
    /// Checks that certificates are given if, and only if, an endpoint uses them.
    fn check_tls(&self) -> Result<(), ConfigError> {
        let (cert, key) = (self.tls_cert.is_some(), self.tls_key.is_some());
        let user = self.nbd.iter().find(|listen| listen.tls_by(self.tls) != TlsPolicy::Off);
        if let Some(listen) = user
            && !(cert && key)
        {
            let what = format!("TLS at {} needs a certificate and its key", listen.at);
            return Err(invalid("server.tls", what, "give both tls_cert and tls_key"));
        }
        if user.is_some() {
            return Ok(());
        }
        if self.tls != TlsPolicy::Off {
            let hint = "it is for tcp: endpoints; a Unix socket has it with unix:PATH,tls=required";
            return Err(invalid("server.tls", "no endpoint uses it", hint));
        }
        if cert || key || self.tls_ca.is_some() {
            let what = "certificates are given, but TLS is off";
            return Err(invalid("server.tls", what, "use \"required\" or \"allowed\""));
        }
        Ok(())
    }
}

/// Checks the name of a volume.
///
/// # Errors
/// Says what can be used.
pub fn check_name(name: &str) -> Result<(), ConfigError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let special = [".", "..", ".forebay"].contains(&name);
    if special || name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(plain) {
        let what = format!("{name:?} cannot be used");
        let hint = format!(
            "use 1 to {NAME_BYTES_MAX} of a-z, A-Z, 0-9, '-', '_', '.', and not '.forebay'"
        );
        return Err(invalid("volume.name", what, &hint));
    }
    Ok(())
}

impl VolumeConfig {
    fn check(&self) -> Result<(), ConfigError> {
        let name = &self.name;
        check_name(name)?;
        if self.primary.is_empty() {
            let key = format!("volume {name:?}: primary");
            return Err(invalid(key, "is empty", "name a path or a URI"));
        }
        Ok(())
    }
}

/// A primary's location, as far as its text tells: the path with links resolved, or the URI without
/// its emulation parameters. Equal locations are the same device.
pub fn location(primary: &str) -> String {
    if primary.starts_with("nbd") && primary.contains("://") {
        let (place, query) = primary.split_once('?').unwrap_or((primary, ""));
        let socket = query.split('&').find(|pair| pair.starts_with("socket="));
        return format!("{place}?{}", socket.unwrap_or_default());
    }
    let path = primary.strip_prefix("file:").unwrap_or(primary);
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    let path = Path::new(path);
    let real = std::fs::canonicalize(path).or_else(|_| {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = std::fs::canonicalize(parent.unwrap_or(Path::new(".")))?;
        Ok::<_, std::io::Error>(parent.join(path.file_name().unwrap_or_default()))
    });
    real.unwrap_or_else(|_| path.to_owned()).to_string_lossy().into_owned()
}
