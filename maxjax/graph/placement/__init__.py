"""Where the parts of an array lie: sharding strategies, meshes and shardings.

``strategy`` is MAX's ``ShardingStrategy``; ``mesh`` makes device meshes; ``specs`` decides which
axis of a weight is split over which axis of a mesh (a ``PartitionSpec``), and says why where one
is not; ``device_major`` is the order of rows that tensor parallelism of fused weights needs;
``arrays`` makes the arrays on the devices.
"""
