//! Bodies of requests that change settings, and of their answers. The schemas are derived from the
//! table of settings.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::openapi::schema::{AdditionalProperties, Schema, Type};
use utoipa::openapi::{ObjectBuilder, RefOr};
use utoipa::{PartialSchema, ToSchema};

use super::{SettingStatus, UpgradeStatus, VolumeStatus};
use crate::pool::{Application, PoolSnapshot, SettingSnapshot};
use crate::settings::{DEFAULT, Difference, Spec, VolumeChange, VolumeDifference, Way};

/// Settings to change through the address of a volume: of that volume and of the whole cache.
/// Absent ones are left unchanged.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct VolumeSettings(pub BTreeMap<String, Option<String>>);

/// Settings of the whole cache to change. Absent ones are left unchanged.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CacheSettings(pub BTreeMap<String, Option<String>>);

impl PartialSchema for VolumeSettings {
    fn schema() -> RefOr<Schema> {
        schema_of(Spec::changeable(true))
    }
}

impl ToSchema for VolumeSettings {}

impl PartialSchema for CacheSettings {
    fn schema() -> RefOr<Schema> {
        schema_of(Spec::changeable(false))
    }
}

impl ToSchema for CacheSettings {}

/// An object with a text for each of these settings.
fn schema_of(settings: impl Iterator<Item = &'static Spec>) -> RefOr<Schema> {
    let all = ObjectBuilder::new().description(Some(
        "Settings to change; absent ones stay. `default` stands for the configured value. Changes \
         are kept for the next starts.",
    ));
    let all = settings.fold(all, |all, spec| {
        let mut said = spec.help.to_owned();
        said.extend(spec.kind.range().map(|range| format!("; {range}")));
        if !spec.is_of_volume() {
            said += "; for all volumes of the cache";
        }
        let one = ObjectBuilder::new().schema_type(Type::String).description(Some(said));
        let names = spec.kind.names();
        let values = (!names.is_empty()).then(|| names.into_iter().chain([DEFAULT]));
        all.property(spec.key, one.enum_values(values))
    });
    all.additional_properties(Some(AdditionalProperties::FreeForm(false))).into()
}

/// A configuration to bring into force.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ApplyRequest {
    /// The text of the configuration file.
    pub config: String,
    /// Its path, for messages.
    pub path: String,
    /// Only answer with the differences.
    #[serde(default)]
    pub dry_run: bool,
}

/// The outcome of [`ApplyRequest`].
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Applied {
    /// Whether the configuration is in force: false for a dry run, and while a hand-over runs.
    pub applied: bool,
    /// How it comes into force: `at once`, by a `hand-over`, or by a hand-over with a `new cache`.
    pub way: String,
    /// The volumes that differ from those that are served.
    pub volumes: Vec<VolumeShift>,
    /// The settings that differ from those in force.
    pub differences: Vec<SettingDifference>,
    /// The hand-over that has begun; `GET /v1/upgrade` tells its outcome.
    pub hand_over: Option<UpgradeStatus>,
}

/// A volume that comes, goes, or becomes another one.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct VolumeShift {
    /// Its name in the given configuration, or the previous one if it goes.
    pub volume: String,
    /// `added`, `removed`, `renamed` or `grown`.
    pub change: String,
    /// The name before, or the size in bytes.
    pub from: Option<String>,
    /// The size afterwards, in bytes.
    pub to: Option<String>,
}

impl VolumeShift {
    /// The difference as the API shows it.
    #[must_use]
    pub fn of(one: VolumeDifference) -> Self {
        let (change, from, to) = match one.change {
            VolumeChange::Added => ("added", None, None),
            VolumeChange::Removed => ("removed", None, None),
            VolumeChange::Renamed(from) => ("renamed", Some(from), None),
            VolumeChange::Grown(from, to) => {
                ("grown", Some(from.to_string()), Some(to.to_string()))
            }
        };
        Self { volume: one.volume, change: change.to_owned(), from, to }
    }
}

impl Applied {
    /// The outcome as the API shows it.
    #[must_use]
    pub fn of(application: Application, dry_run: bool) -> Self {
        let Application { differences, way, hand_over } = application;
        let way = match way {
            Way::Live(_) => "at once",
            Way::HandOver => "hand-over",
            Way::NewCache => "new cache",
        };
        Self {
            applied: !dry_run && hand_over.is_none(),
            way: way.to_owned(),
            volumes: differences.volumes.into_iter().map(VolumeShift::of).collect(),
            differences: differences.settings.into_iter().map(SettingDifference::of).collect(),
            hand_over: hand_over.map(|upgrade| UpgradeStatus::of(Some(&upgrade))),
        }
    }
}

/// A setting that differed.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct SettingDifference {
    /// The volume; absent for a setting of the server.
    pub volume: Option<String>,
    /// Its name, as in the configuration.
    pub name: String,
    /// The value in force before; absent if it was unset.
    pub from: Option<String>,
    /// The value in the given configuration; absent if it is unset.
    pub to: Option<String>,
}

impl SettingDifference {
    /// The difference as the API shows it.
    #[must_use]
    pub fn of(one: Difference) -> Self {
        let Difference { spec, volume, from, to } = one;
        Self { volume, name: spec.key.to_owned(), from, to }
    }
}

/// The settings in force after a change.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct InForce {
    /// The server's settings, and those of the volume if one was named.
    pub settings: Vec<SettingStatus>,
}

/// A volume after a change of its settings.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct VolumeInForce {
    /// The volume.
    #[serde(flatten)]
    pub volume: VolumeStatus,
    /// The settings of the volume and of the server.
    pub settings: Vec<SettingStatus>,
}

impl InForce {
    /// The settings in a snapshot: those of the server, and of `volume` if given.
    #[must_use]
    pub fn of(pool: &PoolSnapshot, volume: Option<&str>) -> Self {
        let shown = |setting: &&SettingSnapshot| {
            setting.volume.as_deref().is_none_or(|name| Some(name) == volume)
        };
        Self { settings: pool.settings.iter().filter(shown).map(SettingStatus::of).collect() }
    }
}
