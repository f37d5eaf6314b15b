//! Two forms of number: codes, which are alternatives, and flags, which are combined.

/// A newtype with named values that also carries values without a name.
macro_rules! codes {
    (
        $(#[$outer:meta])*
        pub struct $name:ident: $int:ty { $($(#[$inner:meta])* $code:ident = $value:expr,)* }
    ) => {
        $(#[$outer])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub struct $name(pub $int);

        impl $name {
            $($(#[$inner])* pub const $code: Self = Self($value);)*
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match *self {
                    $(Self::$code => f.write_str(stringify!($code)),)*
                    Self(other) => write!(f, "{other:#x}"),
                }
            }
        }
    };
}

/// A newtype of bits.
macro_rules! flags {
    (
        $(#[$outer:meta])*
        pub struct $name:ident: $int:ty { $($(#[$inner:meta])* $flag:ident = $bit:expr,)* }
    ) => {
        $(#[$outer])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
        pub struct $name(pub $int);

        impl $name {
            /// No flag.
            pub const NONE: Self = Self(0);
            $($(#[$inner])* pub const $flag: Self = Self(1 << $bit);)*

            /// Whether every flag of `other` is set.
            #[must_use]
            pub const fn has(self, other: Self) -> bool {
                self.0 & other.0 == other.0
            }

            /// The flags that are set here but not in `other`.
            #[must_use]
            pub const fn without(self, other: Self) -> Self {
                Self(self.0 & !other.0)
            }

            /// The flags of both.
            #[must_use]
            pub const fn with(self, other: Self) -> Self {
                Self(self.0 | other.0)
            }

            /// These flags, and those of `other` if `set`.
            #[must_use]
            pub const fn with_if(self, set: bool, other: Self) -> Self {
                if set { self.with(other) } else { self }
            }
        }

        impl std::ops::BitOr for $name {
            type Output = Self;

            fn bitor(self, other: Self) -> Self {
                self.with(other)
            }
        }
    };
}

pub(crate) use codes;
pub(crate) use flags;
