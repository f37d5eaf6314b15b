//! The tables of clause 1.3, their sizes, and their indexes.

/// Number of districts per warehouse.
pub const DISTRICTS: u32 = 10;

/// The size of the database. In a run according to the specification, only the number of warehouses
/// may vary; tests reduce the rest too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scale {
    /// Number of warehouses.
    pub warehouses: u32,
    /// Number of items, and of stock rows per warehouse.
    pub items: u32,
    /// Number of customers, and of initial orders, per district.
    pub customers: u32,
}

impl Scale {
    /// The size according to the specification.
    pub const fn specified(warehouses: u32) -> Self {
        Self { warehouses, items: 100_000, customers: 3_000 }
    }

    /// One small warehouse that loads quickly, for tests.
    pub const fn tiny() -> Self {
        Self { warehouses: 1, items: 2_000, customers: 120 }
    }

    /// The number of the first undelivered order at the start.
    pub const fn first_new_order(self) -> u32 {
        self.customers / 10 * 7 + 1
    }
}

/// Every table, in the order of loading.
pub const TABLES: [&str; 9] = [
    "item",
    "warehouse",
    "district",
    "customer",
    "history",
    "orders",
    "new_order",
    "order_line",
    "stock",
];

/// The statements that create the tables, in an existing database.
pub const CREATE: [&str; 9] = [
    "CREATE TABLE item (i_id INT NOT NULL PRIMARY KEY, i_im_id INT, i_name VARCHAR(24), \
     i_price DECIMAL(5,2), i_data VARCHAR(50)) ENGINE=InnoDB",
    "CREATE TABLE warehouse (w_id SMALLINT NOT NULL PRIMARY KEY, w_name VARCHAR(10), \
     w_street_1 VARCHAR(20), w_street_2 VARCHAR(20), w_city VARCHAR(20), w_state CHAR(2), \
     w_zip CHAR(9), w_tax DECIMAL(4,4), w_ytd DECIMAL(12,2)) ENGINE=InnoDB",
    "CREATE TABLE district (d_id TINYINT NOT NULL, d_w_id SMALLINT NOT NULL, d_name VARCHAR(10), \
     d_street_1 VARCHAR(20), d_street_2 VARCHAR(20), d_city VARCHAR(20), d_state CHAR(2), \
     d_zip CHAR(9), d_tax DECIMAL(4,4), d_ytd DECIMAL(12,2), d_next_o_id INT NOT NULL, \
     PRIMARY KEY (d_w_id, d_id)) ENGINE=InnoDB",
    "CREATE TABLE customer (c_id INT NOT NULL, c_d_id TINYINT NOT NULL, c_w_id SMALLINT NOT NULL, \
     c_first VARCHAR(16), c_middle CHAR(2), c_last VARCHAR(16), c_street_1 VARCHAR(20), \
     c_street_2 VARCHAR(20), c_city VARCHAR(20), c_state CHAR(2), c_zip CHAR(9), \
     c_phone CHAR(16), c_since DATETIME, c_credit CHAR(2), c_credit_lim DECIMAL(12,2), \
     c_discount DECIMAL(4,4), c_balance DECIMAL(12,2), c_ytd_payment DECIMAL(12,2), \
     c_payment_cnt SMALLINT UNSIGNED, c_delivery_cnt SMALLINT UNSIGNED, c_data VARCHAR(500), \
     PRIMARY KEY (c_w_id, c_d_id, c_id), KEY by_name (c_w_id, c_d_id, c_last, c_first)) \
     ENGINE=InnoDB",
    "CREATE TABLE history (h_c_id INT, h_c_d_id TINYINT, h_c_w_id SMALLINT, h_d_id TINYINT, \
     h_w_id SMALLINT, h_date DATETIME, h_amount DECIMAL(6,2), h_data VARCHAR(24)) ENGINE=InnoDB",
    "CREATE TABLE orders (o_id INT NOT NULL, o_d_id TINYINT NOT NULL, o_w_id SMALLINT NOT NULL, \
     o_c_id INT, o_entry_d DATETIME, o_carrier_id TINYINT, o_ol_cnt TINYINT, o_all_local TINYINT, \
     PRIMARY KEY (o_w_id, o_d_id, o_id), KEY by_customer (o_w_id, o_d_id, o_c_id, o_id)) \
     ENGINE=InnoDB",
    "CREATE TABLE new_order (no_o_id INT NOT NULL, no_d_id TINYINT NOT NULL, \
     no_w_id SMALLINT NOT NULL, PRIMARY KEY (no_w_id, no_d_id, no_o_id)) ENGINE=InnoDB",
    "CREATE TABLE order_line (ol_o_id INT NOT NULL, ol_d_id TINYINT NOT NULL, \
     ol_w_id SMALLINT NOT NULL, ol_number TINYINT NOT NULL, ol_i_id INT, ol_supply_w_id SMALLINT, \
     ol_delivery_d DATETIME, ol_quantity TINYINT, ol_amount DECIMAL(6,2), ol_dist_info CHAR(24), \
     PRIMARY KEY (ol_w_id, ol_d_id, ol_o_id, ol_number)) ENGINE=InnoDB",
    "CREATE TABLE stock (s_i_id INT NOT NULL, s_w_id SMALLINT NOT NULL, s_quantity SMALLINT, \
     s_dist_01 CHAR(24), s_dist_02 CHAR(24), s_dist_03 CHAR(24), s_dist_04 CHAR(24), \
     s_dist_05 CHAR(24), s_dist_06 CHAR(24), s_dist_07 CHAR(24), s_dist_08 CHAR(24), \
     s_dist_09 CHAR(24), s_dist_10 CHAR(24), s_ytd INT, s_order_cnt SMALLINT UNSIGNED, \
     s_remote_cnt SMALLINT UNSIGNED, s_data VARCHAR(50), PRIMARY KEY (s_w_id, s_i_id)) \
     ENGINE=InnoDB",
];
