//! How long a thread rests: the time that passes less the CPU time that it uses.

use std::time::Duration;

use forebay_block::Instant;
use rustix::time::{ClockId, clock_gettime};

/// Time between two looks at the thread's CPU time, which takes a system call.
const LOOK: Duration = Duration::from_millis(10);

/// CPU time that the calling thread has used.
pub fn thread_cpu() -> Duration {
    let cpu = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(cpu.tv_sec as u64, cpu.tv_nsec as u32)
}

/// The rest of the calling thread since the last look.
#[derive(Debug)]
pub struct Rest {
    looked: Instant,
    cpu: Duration,
}

impl Rest {
    /// Begins at `now`.
    pub fn since(now: Instant) -> Self {
        Self { looked: now, cpu: thread_cpu() }
    }

    /// The rest until `now`, if it is time to look.
    pub fn look(&mut self, now: Instant) -> Option<Duration> {
        let passed = now.since(self.looked);
        (passed >= LOOK).then(|| {
            let cpu = thread_cpu();
            let used = cpu.saturating_sub(self.cpu);
            (self.looked, self.cpu) = (now, cpu);
            passed.saturating_sub(used)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_sleeps_rests_and_one_that_works_does_not() {
        let start = std::time::Instant::now();
        let now = || Instant(start.elapsed().as_nanos() as u64);
        let mut rest = Rest::since(now());
        assert_eq!(rest.look(now()), None, "it is too early");
        std::thread::sleep(Duration::from_millis(50));
        let slept = rest.look(now()).expect("it is time");
        assert!(slept >= Duration::from_millis(45), "{slept:?}");
        let cpu = thread_cpu();
        while thread_cpu() - cpu < Duration::from_millis(50) {}
        let passed = now().since(rest.looked);
        let worked = rest.look(now()).expect("it is time");
        assert!(worked <= passed - Duration::from_millis(45), "{worked:?} of {passed:?}");
    }
}
