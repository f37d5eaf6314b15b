//! A volume that comes, goes or gets another name while clients use the others.

use forebay_block::testing::Numbers;

use super::Log;
use super::pool::Pool;
use super::volume::Volume;

/// Names for volumes that get another one.
const NAMES: [&str; 3] = ["moved", "db-2", "y.z"];

/// A change of one volume.
pub struct Shift {
    /// Its index.
    pub at: usize,
    name: String,
    what: What,
}

enum What {
    Comes,
    Goes,
    Renamed(&'static str),
}

impl Shift {
    /// A change that is possible now, or none.
    pub fn any(pool: &Pool, numbers: &mut Numbers) -> Option<Self> {
        if !pool.is_kept() || numbers.below(2) == 0 {
            return None;
        }
        let volumes = &pool.volumes;
        let (at, what) = match volumes.iter().position(|volume| !volume.served) {
            Some(at) => (at, What::Comes),
            None if numbers.below(2) == 0 => {
                (numbers.below(volumes.len() as u64) as usize, What::Goes)
            }
            None => {
                let name = NAMES[numbers.below(NAMES.len() as u64) as usize];
                let is_free = volumes.iter().all(|volume| volume.name != name);
                let at = numbers.below(volumes.len() as u64) as usize;
                (at, is_free.then_some(What::Renamed(name))?)
            }
        };
        Some(Self { at, name: volumes[at].name.clone(), what })
    }

    /// The change in words.
    pub fn describe(&self) -> String {
        let name = &self.name;
        match self.what {
            What::Comes => format!("apply: volume {name} is added"),
            What::Goes => format!("apply: volume {name} is removed"),
            What::Renamed(new) => format!("apply: volume {name} is called {new}"),
        }
    }

    /// The tables of all volumes in the configuration, after the change.
    pub fn tables(&self, volumes: &[Volume]) -> String {
        let table = |(at, volume): (usize, &Volume)| match self.what {
            What::Comes if at == self.at => volume.table(),
            What::Goes if at == self.at => String::new(),
            What::Renamed(new) if at == self.at => volume.table_as(new),
            _ if volume.served => volume.table(),
            _ => String::new(),
        };
        volumes.iter().enumerate().map(table).collect()
    }

    /// Notes that the change is in force. A volume that is gone must be complete on its primary,
    /// which is then used alone.
    pub fn note(
        self,
        volumes: &mut [Volume],
        numbers: &mut Numbers,
        log: &Log,
    ) -> anyhow::Result<()> {
        let volume = &mut volumes[self.at];
        volume.set = None;
        match self.what {
            What::Comes => {
                (volume.served, volume.is_known) = (true, true);
                volume.notice.forget();
                volume.notice.set_mode(Some(volume.configured));
            }
            What::Goes => {
                volume.served = false;
                volume.check_alone()?;
                log.say(&format!("the primary of {} is written meanwhile", volume.name));
                volume.use_alone(numbers)?;
            }
            What::Renamed(new) => new.clone_into(&mut volume.name),
        }
        Ok(())
    }
}
