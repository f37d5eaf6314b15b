//! Numbers of the protocol: operations, and the flags that this server uses.

/// An operation. Any number may arrive; the known ones have a name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Op(pub u32);

macro_rules! operations {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        #[allow(missing_docs)]
        impl Op {
            $(pub const $name: Self = Self($number);)*

            /// Its name, for messages.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                    _ => "an unknown operation",
                }
            }
        }
    };
}

operations! {
    LOOKUP = 1, "LOOKUP";
    FORGET = 2, "FORGET";
    GETATTR = 3, "GETATTR";
    SETATTR = 4, "SETATTR";
    OPEN = 14, "OPEN";
    READ = 15, "READ";
    WRITE = 16, "WRITE";
    STATFS = 17, "STATFS";
    RELEASE = 18, "RELEASE";
    FSYNC = 20, "FSYNC";
    FLUSH = 25, "FLUSH";
    INIT = 26, "INIT";
    OPENDIR = 27, "OPENDIR";
    READDIR = 28, "READDIR";
    RELEASEDIR = 29, "RELEASEDIR";
    FSYNCDIR = 30, "FSYNCDIR";
    INTERRUPT = 36, "INTERRUPT";
    DESTROY = 38, "DESTROY";
    BATCH_FORGET = 42, "BATCH_FORGET";
    FALLOCATE = 43, "FALLOCATE";
    SYNCFS = 50, "SYNCFS";
}

impl Op {
    /// Length in bytes of the operation's own structure. The bytes after it are data: a name, or
    /// the data to write.
    #[must_use]
    pub fn argument_bytes(self) -> usize {
        match self {
            Self::GETATTR | Self::FSYNC | Self::FSYNCDIR => 16,
            Self::SETATTR => 88,
            Self::OPEN | Self::OPENDIR | Self::FORGET | Self::INTERRUPT => 8,
            Self::READ | Self::READDIR | Self::WRITE => 40,
            Self::RELEASE | Self::RELEASEDIR | Self::FLUSH => 24,
            Self::INIT => 64,
            Self::FALLOCATE => 32,
            _ => 0,
        }
    }

    /// Whether the kernel expects no answer.
    #[must_use]
    pub fn is_silent(self) -> bool {
        matches!(self, Self::FORGET | Self::BATCH_FORGET)
    }
}

/// Capabilities negotiated at the start. Bits 32 and above travel in `flags2`.
pub struct Init;

#[allow(missing_docs)]
impl Init {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const HAS_RESEND: u64 = 1 << 39;
    pub const OVER_IO_URING: u64 = 1 << 41;
}

/// The behavior of an open file, in the answer to an open.
pub struct Open;

#[allow(missing_docs)]
impl Open {
    pub const DIRECT_IO: u32 = 1 << 0;
    pub const KEEP_CACHE: u32 = 1 << 1;
    pub const CACHE_DIR: u32 = 1 << 3;
    pub const NOFLUSH: u32 = 1 << 5;
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Mode bits of fallocate(2).
pub struct Mode;

#[allow(missing_docs)]
impl Mode {
    pub const KEEP_SIZE: u32 = 1;
    pub const PUNCH_HOLE: u32 = 2;
    pub const ZERO_RANGE: u32 = 16;
}
